"""Failures of the network, the operating system or a server, found in the chain of causes of an exception.

They are found by the names of their classes and by their codes, so that no package need be imported.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

_LINKS = ("__cause__", "__context__", "original_exception", "orig", "reason", "last_attempt")
"""What an exception was raised from or while handling; some libraries keep it elsewhere."""
_MAX_CAUSES = 100
_INFRASTRUCTURE = {
    "TransportError", "APIConnectionError",  # httpx; openai, anthropic
    "ClientConnectionError", "ClientPayloadError",  # aiohttp
    "ConnectionError", "Timeout", "ChunkedEncodingError",  # requests, redis, botocore
    "MaxRetryError", "NewConnectionError", "ProtocolError",  # urllib3
    "HTTPClientError", "EndpointConnectionError",  # botocore
    "IncompleteRead", "BadStatusLine",  # http.client
    "TimeoutError", "TimeoutException", "TimeoutExpired",  # any package; subprocess
    "AutoReconnect", "ServerSelectionTimeoutError",  # pymongo
    "PostgresConnectionError", "TooManyConnectionsError",  # asyncpg
    "MemoryError", "OutOfMemoryError", "BrokenExecutor",  # torch; a process of a pool was killed
    "BrokenResourceError", "ClosedResourceError",  # anyio, in which MCP clients run
    "AttemptEndedError",  # of a thread or task that belongs to another rollout
}  # fmt: skip
_OF_THE_REQUEST = {
    "UnsupportedProtocol", "LocalProtocolError", "InvalidURL", "InvalidSchema", "MissingSchema", "InvalidHeader",
    "InvalidJSONError", "JSONDecodeError", "LocationParseError", "TooManyRedirects",
}  # fmt: skip
"""Errors of HTTP clients about what they were given. Some derive from ``OSError``."""
_SERVER_STATUSES = {401, 402, 403, 407, 408, 425, 429}
"""Besides 5xx: the tool's own key, or too many requests. Any other status is an answer, to what was asked."""
_SQLITE_CODES = {3, 5, 6, 7, 10, 11, 13, 14, 15, 17, 22, 26}
"""PERM, BUSY, LOCKED, NOMEM, IOERR, CORRUPT, FULL, CANTOPEN, PROTOCOL, SCHEMA, NOLFS, NOTADB: no query causes them."""
_SQLITE_MESSAGES = re.compile(
    "access perm|database (is|table is|schema|disk|or disk)|disk I/O|file is not|large file|locking|out of mem|unable"
)
"""How their messages begin: Python 3.10 has no codes. No message that quotes a name of the query begins so."""
_MYSQL = {1021, 1040, 1114, 1203, 1205, 1213}
"""Disk full, too many connections, table full, lock wait timeout, deadlock. The client's own codes are 2xxx."""
_CONNECTED = {
    "ReadTimeout", "ReadTimeoutError", "ReadError", "RemoteProtocolError",  # requests, httpx, urllib3
    "RemoteDisconnected", "ServerDisconnectedError", "IncompleteRead", "ChunkedEncodingError", "ClientPayloadError",
    "ConnectionResetError", "BrokenPipeError",
}  # fmt: skip
"""Errors after a connection was made, so there is such a host."""
_IN_TEXT = re.compile(
    r"\b(?:E(?:CONN\w+|TIMEDOUT|NOTFOUND|AI_AGAIN|PIPE|NOSPC|N?FILE|MFILE|NOMEM|IO)"
    rf"|\w*(?:{'|'.join(_INFRASTRUCTURE - {'Timeout'})})|\w+Timeout|Connection\w+Error|OSError)\b"
)
"""Classes of exceptions, and codes of the operating system, in what a program writes."""
_SHORT_OF = {
    "memory": re.compile("can(?:'|no)t allocate mem|not enough memory|bad_alloc|map segment from shared object$", re.I),
    "files": re.compile("too many open files", re.I),
    "processes": re.compile("can't start new thread|resource temporarily unavailable", re.I),
}
_SHORT_ERRNOS = {errno.ENOMEM: "memory", errno.EMFILE: "files", errno.ENFILE: "files"}
_HOST = re.compile(r"[\w-]+(?:\.[\w-]+)+")
_RESOURCE_NAMES = (
    *("url", "str_or_url", "fullurl", "full_url", "host", "address"),
    *("path", "file", "filename", "file_path", "database", "db_path", "cmd", "command"),
)


def causes(error: BaseException | None) -> list[BaseException]:
    """``error``, the exceptions that it was raised from or while handling, and the members of groups; nearest first."""
    chain: list[BaseException] = []
    waiting: list[Any] = [error]
    while waiting and len(chain) < _MAX_CAUSES:
        cause = waiting.pop(0)
        if not isinstance(cause, BaseException) or any(cause is other for other in chain):
            continue
        chain.append(cause)
        waiting += _linked(cause)
    return chain


def _linked(error: BaseException) -> Iterator[Any]:
    yield from error.args
    for name in (*_LINKS, "exceptions"):
        with suppress(Exception):  # an attribute may be computed
            link: Any = getattr(error, name, None)
            if callable(getattr(link, "exception", None)):  # a future, as tenacity has it
                link = link.exception(0)
            yield from link if isinstance(link, tuple) else [link]


def infrastructure_errors(error: BaseException) -> list[BaseException]:
    """The failures of the network, the operating system or a server in the chain of causes of ``error``."""
    return [cause for cause in causes(error) if _is_infrastructure(cause)]


def short_of(error: BaseException) -> str:
    """What this machine has no more of, if ``error`` itself says so: memory, files (open ones) or processes."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError):
        of_process = error.errno == errno.EAGAIN and error.filename is None and type(error) is BlockingIOError
        return "processes" if of_process else _SHORT_ERRNOS.get(error.errno or 0, "")
    if not isinstance(error, (RuntimeError, ImportError)):
        return ""
    return next((name for name, text in _SHORT_OF.items() if text.search(str(error))), "")


def is_sqlite_failure(error: BaseException) -> bool:
    """Whether an exception of the module ``sqlite3`` is about the database's file, and not about the query."""
    code = getattr(error, "sqlite_errorcode", None)
    return _SQLITE_MESSAGES.match(str(error)) is not None if code is None else code & 0xFF in _SQLITE_CODES


def is_infrastructure_text(text: str) -> bool:
    """Whether the last lines of a program that failed name such a failure."""
    return any(words.search(text) for words in (_IN_TEXT, *_SHORT_OF.values()))


def hosts_in(text: str) -> set[str]:
    """What may be hosts in ``text``."""
    return set(_HOST.findall(text))


def named_resources(broken: Sequence[BaseException]) -> set[str]:
    """The hosts, URLs, files and commands that a failure is about, from its attributes and from where it was raised.

    ``broken`` are its :func:`infrastructure_errors`. A host that has answered, if only with a status, is none of them.
    """
    if any(_status(cause) or {kind.__name__ for kind in type(cause).__mro__} & _CONNECTED for cause in broken):
        return set()
    names = set[str]()
    for value in (value for cause in broken for value in _values(cause)):
        for text in value if isinstance(value, (list, tuple)) else [value]:
            name = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
            with suppress(ValueError):  # no URL
                names |= {name, urlsplit(name).hostname or "" if "://" in name else name.rsplit("/", 1)[-1]}
    return {name for name in names if len(name) > 2 and not name.isdigit()}


def _is_infrastructure(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _OF_THE_REQUEST:
        return False
    if (status := _status(error)) is not None:
        return status in _SERVER_STATUSES or status >= 500
    if "QueryCanceled" in names:  # psycopg: the statement took too long
        return False
    if "OperationalError" in names or type(error).__module__ == "sqlite3":
        return _is_database_down(error)
    if "RequestException" in names or names & {"URLError", "HTTPException"}:  # no status: what is behind it says more
        return bool(names & _INFRASTRUCTURE)
    return isinstance(error, OSError) or bool(names & _INFRASTRUCTURE) or bool(short_of(error))


def _status(error: BaseException) -> int | None:
    """The HTTP status in an exception of any client: requests, httpx, openai, aiohttp, urllib, botocore."""
    with suppress(Exception):  # as in _linked
        response = getattr(error, "response", None)
        names = ("status_code", "status")
        statuses = [getattr(candidate, name, None) for candidate in (error, response) for name in names]
        if isinstance(response, dict):
            statuses.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
        if type(error).__name__ == "HTTPError":
            statuses.append(getattr(error, "code", None))
        return next((status for status in statuses if isinstance(status, int) and 400 <= status < 600), None)
    return None


def _is_database_down(error: BaseException) -> bool:
    """Whether an error of a database's driver is about the database, and not about the statement."""
    if getattr(error, "orig", None) is not None:  # SQLAlchemy's: the driver's own decides
        return False
    code = error.args[0] if error.args else ""
    if isinstance(code, int):  # MySQL
        return 2000 <= code < 3000 or code in _MYSQL
    return type(error).__module__ != "sqlite3" or is_sqlite_failure(error)


def _values(error: BaseException) -> Iterator[Any]:
    for name in ("filename", "filename2", "cmd", "url", "host", "request"):
        with suppress(Exception):  # as in _linked: httpx's errors before the request is sent have no request
            value = getattr(error, name, None) or ""
            yield getattr(value, "url", value)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        variables = frame.f_locals
        yield from (variables[name] for name in _RESOURCE_NAMES if isinstance(variables.get(name), (str, bytes, tuple)))
