"""Keys and personal data in traces, replaced before anything is shown, written or learned; what is replaced is counted.

Replaced are known secrets (:mod:`groundwire.tools.secrets`), keys of known forms, e-mail and IP addresses, telephone,
card and account numbers. Names of people and places have no form, so they stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from groundwire.tools.secrets import secret_masker

_KEYS = (
    r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}|\b(?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{10,}|\bgh[opsur]_[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_\w{20,}|\bAKIA[A-Z0-9]{12,}|\bAIza[\w-]{30,}|\bxox[abprs]-[\w-]{10,}|\bhf_[A-Za-z0-9]{20,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|\b(?:lsv2|ls__|glpat|npm)[_-]\w{16,}|(?i:(?<=bearer ))[\w.~+/-]{16,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----"
)
_FORMS = {
    "key": _KEYS,
    "email": r"\b[\w.+%-]+@[\w-]+(?:\.[\w-]+)+\b",
    "iban": r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b",
    "card": r"(?<![\w.-])\d{4}(?:[ -]?\d){9,15}(?![\w-])",
    "ssn": r"(?<![\w-])\d{3}-\d{2}-\d{4}(?![\w-])",
    "ip": r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])",
    "phone": r"(?<![\w.+-])(?:\+\d{1,3}[ .()/-]*(?:\d[ .()/-]{0,2}){6,12}"
    r"|\(?0\d{2,4}\)?[ /-]\d{2,}(?:[ -]?\d){3,8})(?!\w)"
    r"|(?<![\w.-])\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}(?![\w-])",
}  # fmt: skip
_PATTERN = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _FORMS.items()))
_HAS = re.compile(r"[@\d]|-----BEGIN|[Bb]earer ")
_LINKS = {"span_id", "parent_id", "call_id", "tool_call_id", "tool_use_id", "uuid", "parentUuid", "timestamp", "id"}
"""Fields whose values link records."""
_ID = re.compile(r"[A-Za-z][\w.:-]*|[0-9a-f]{8}[0-9a-f-]*")
NAMES = {
    "key": "key",
    "email": "e-mail",
    "iban": "bank account",
    "card": "card number",
    "ssn": "social security number",
    "ip": "IP number",
    "phone": "telephone number",
    "secret": "text with a known secret",
}


class Masker:
    """Masks the texts of records; ``replaced`` counts by kind, each text of a trace once."""

    def __init__(self) -> None:
        self.replaced = Counter[str]()
        self._secrets: Callable[[str], str] = secret_masker()
        self._texts: dict[str, str] = {}

    def begin(self) -> None:
        """A trace begins."""
        self._texts.clear()

    def mask(self, value: Any) -> Any:
        """``value`` with all its texts masked, but for those that are ids."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {
                key: item if key in _LINKS and isinstance(item, str) and _ID.fullmatch(item) else self.mask(item)
                for key, item in value.items()
            }
        return list(map(self.mask, value)) if isinstance(value, list | tuple) else value

    def _text(self, text: str) -> str:
        if (known := self._texts.get(text)) is None:
            known = self._secrets(text)
            if known != text:
                self.replaced["secret"] += 1
            if _HAS.search(known):
                known = _PATTERN.sub(self._replace, known)
            self._texts[text] = known
        return known

    def _replace(self, match: re.Match[str]) -> str:
        kind = str(match.lastgroup)
        if not _CHECKS.get(kind, bool)("".join(filter(str.isalnum, match[0]))):
            return match[0]
        self.replaced[kind] += 1
        return f"[{kind}]"


def _is_card(digits: str) -> bool:
    """Luhn's sum."""
    doubled = (int(digit) * (1 + place % 2) for place, digit in enumerate(reversed(digits)))
    return sum(value - 9 * (value > 9) for value in doubled) % 10 == 0


def _is_account(text: str) -> bool:
    """The remainder of ISO 13616."""
    return int("".join(str(int(char, 36)) for char in text[4:] + text[:4])) % 97 == 1


_CHECKS: Mapping[str, Callable[[str], bool]] = {"card": _is_card, "iban": _is_account}
