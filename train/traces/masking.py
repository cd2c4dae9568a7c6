"""Keys and personal data in traces, replaced before anything is shown, written or learned; what is replaced is counted.

Replaced are known secrets (:mod:`groundwire.tools.secrets`), keys of known forms, values of names such as ``password``,
e-mail and IP addresses, telephone, card, account and identity numbers. Names of people and places have no form, so
they stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from ipaddress import IPv6Address
from typing import Any

from groundwire.tools.secrets import secret_masker

_KEY = re.compile(
    # ordinary words may begin like a key, and have no digits
    r"\b(?:sk|pk|rk|xai|pplx|tvly|GOCSPX|HRKU|NRAK|xapp|gl[a-z]{2,6}|pypi|xox[abeprs]|AGE-SECRET-KEY)-(?=[\w-]*\d)"
    r"[\w-]{16,}"
    r"|\b(?:gh[opsur]|github_pat|dckr_pat|do[opr]_v1|shp(?:at|ca|pa|ss)|pcsk|lin_api|pscale_[a-z]+|lsv2|ls_|glpat"
    r"|[spr]k_(?:live|test))_(?=\w*\d)\w{10,}"
    r"|\b(?:hf|r8|gsk|fw|whsec|npm|ntn|sbp)_[A-Za-z0-9]{20,}\b|\b(?:ya29|hvs|SG)\.(?=[\w.-]*\d)[\w.-]{20,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[\w-]{30,}|\b(?:key-|fc-|dapi|SK|AC)[0-9a-f]{32}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|\b\d{8,10}:AA[\w-]{30,}|\b[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,}"
    r"|(?<=hooks\.slack\.com/services/)[\w/]{20,}|(?<=/api/webhooks/)\d+/[\w-]{20,}|(?<=[?&]sig=)[\w%]{20,}"
)
_WORD = re.compile(r"[\w.:/?&=%-]{16,}")
"""What a key is part of: to look for one there only is fast."""
_BEARER = re.compile(r"(?<=[Bb]earer )(?=[\w.~+/-]*\d)[\w.~+/-]{16,}=*")
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY( BLOCK)?-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY( BLOCK)?-----|\Z)")
_EMAIL = re.compile(r"\b(?!git@)[\w.+%-]+@[\w-]+(?:\.[\w-]+)+\b")
_IP_6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{1,4}::?){3,7}[0-9A-Fa-f]{1,4}(?![\w:])")
_NUMBERS = {
    "iban": r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b",
    "ssn": r"(?<![\w-])\d{3}-\d{2}-\d{4}(?![\w-])"
    r"|\b[1-9]\d{5}(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[\dX]\b",  # United States, China
    "card": r"(?<![\w.-])(?:[3-6]\d{3}|2[2-7]\d\d)(?:[ -]?\d){9,15}(?![\w-])",
    "ip": r"(?<![\w.])(?<!ersion )(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])",
    "phone": r"(?<![\w.+-])(?:\+\d{1,3}[ .()/-]*(?:\d[ .()/-]{0,2}){6,12}"
    r"|\(?0[1-9]\d{1,3}\)? ?[ /-] ?\d{2,}(?:[ -]?\d){3,8}|\(\d\d\) ?9?\d{4}-\d{4}|0[1-9](?:[ .-]\d\d){4})(?!\w)"
    r"|(?<![\w.-])(?:1[ .-])?\(?[2-9]\d\d\)?[ .-][2-9]\d\d[ .-]\d{4}(?![\w-])"
    r"|(?<![\w.-])1[3-9]\d[ -]\d{4}[ -]\d{4}(?![\w-])|(?<=[话机码号\uff1a]) ?1[3-9]\d{9}(?!\w)",
}  # fmt: skip
_NUMBER = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _NUMBERS.items()))
_DIGITS = re.compile(r"\d[\dA-Z .()/-]{5,}\d")
_NAMED = (
    r"(?:(?i:(?:api|secret|access|account|auth|private)[_-]?key|(?:access|auth|refresh|api|session|bot)[_-]?token"
    r"|(?<![a-z_-])token|secret|password|passwd|pwd|authorization|cookie)|[A-Z]_(?:KEY|TOKEN|SECRET|PASS))"
)
_ASSIGNED = re.compile(
    rf"({_NAMED}\\?[\"']?\s*[:=]\s*\\?[\"']?(?:[A-Za-z]+ )?)([^\s\"',;()\[\]{{}}<>$\\]{{8,}})(?![\w(\[.])"
)
"""A name of a secret, and what is given as its value."""
_IS_NAMED = re.compile(rf"{_NAMED}$")
_HAS_NAME = re.compile(r"(?i)key|token|secret|passw|pwd|auth|cookie|_pass")
_LINKS = {"span_id", "parent_id", "call_id", "tool_call_id", "tool_use_id", "uuid", "parentUuid", "timestamp", "id"}
"""Fields whose values link records."""
_ID = re.compile(r"[A-Za-z][\w.:-]*|[0-9a-f]{8}[0-9a-f-]*")
NAMES = {
    "key": "key",
    "email": "e-mail",
    "iban": "bank account",
    "card": "card number",
    "ssn": "identity number",
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
                key: item if key in _LINKS and isinstance(item, str) and _ID.fullmatch(item) else self._field(key, item)
                for key, item in value.items()
            }
        return list(map(self.mask, value)) if isinstance(value, list | tuple) else value

    def _field(self, name: Any, value: Any) -> Any:
        if isinstance(value, str) and isinstance(name, str) and _IS_NAMED.search(name) and _is_secret(value):
            self.replaced["key"] += 1
            return "[key]"
        return self.mask(value)

    def _text(self, text: str) -> str:
        if (known := self._texts.get(text)) is None:
            known = self._secrets(text)
            if known != text:
                self.replaced["secret"] += 1
            known = self._masked(known)
            self._texts[text] = known
        return known

    def _masked(self, text: str) -> str:
        if "-----BEGIN" in text:
            text = _PEM.sub(partial(self._replace, "key"), text)
        text = _WORD.sub(lambda word: _KEY.sub(partial(self._replace, "key"), word[0]), text)
        if "earer " in text:
            text = _BEARER.sub(partial(self._replace, "key"), text)
        if _HAS_NAME.search(text):
            text = _ASSIGNED.sub(self._replace_value, text)
        if "@" in text:
            text = _EMAIL.sub(partial(self._replace, "email"), text)
        if text.count(":") > 2:
            text = _IP_6.sub(partial(self._replace, "ip"), text)
        return _NUMBER.sub(partial(self._replace, ""), text) if _DIGITS.search(text) else text

    def _replace_value(self, match: re.Match[str]) -> str:
        if not _is_secret(match[2]):
            return match[0]
        self.replaced["key"] += 1
        return f"{match[1]}[key]"

    def _replace(self, kind: str, match: re.Match[str]) -> str:
        kind = kind or str(match.lastgroup)
        if not _CHECKS.get(kind, bool)(re.sub("[ -]", "", match[0])):
            return match[0]
        self.replaced[kind] += 1
        return f"[{kind}]"


def _is_card(digits: str) -> bool:
    """Luhn's sum."""
    doubled = (int(digit) * (1 + place % 2) for place, digit in enumerate(reversed(digits)))
    return sum(value - 9 * (value > 9) for value in doubled) % 10 == 0


def _is_secret(text: str) -> bool:
    """Whether a value may be a key or a password: one word with letters and digits."""
    return any(map(str.isdigit, text)) and any(map(str.isalpha, text)) and not any(map(str.isspace, text))


def _is_address(text: str) -> bool:
    """Of version 4 by its form; of version 6 if all of it is one."""
    try:
        return "." in text or bool(IPv6Address(text))
    except ValueError:
        return False


def _is_account(text: str) -> bool:
    """The remainder of ISO 13616."""
    return int("".join(str(int(char, 36)) for char in text[4:] + text[:4])) % 97 == 1


_CHECKS: Mapping[str, Callable[[str], bool]] = {"card": _is_card, "iban": _is_account, "ip": _is_address}
