"""A server that speaks MongoDB's wire protocol over a dictionary, for the commands that Agent Lightning's store sends.

It is a fake: no MongoDB can be installed from a package index. Documents, filters, updates, unique indexes and the
rollback of a transaction behave as MongoDB's manual says; isolation, replication and everything else are missing.
"""

from __future__ import annotations

import asyncio
import copy
import re
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

try:
    import bson
except ImportError:  # of pymongo; then nothing here is used
    bson = None  # type: ignore[assignment]

_HEADER, _OP_QUERY, _OP_REPLY, _OP_MSG = struct.Struct("<iiii"), 2004, 1, 2013
_DUPLICATE = 11000
Document = dict[str, Any]


class FakeMongo:
    """The data, which outlives connections, and one method for each command."""

    def __init__(self, *, replica_set: str | None = "rs0") -> None:
        self.address, self.replica_set = "", replica_set
        self.data: dict[str, list[Document]] = {}
        self.unique: dict[str, list[list[str]]] = {}
        self._before: dict[Any, dict[str, list[Document]]] = {}
        self.commands: list[str] = []
        """The name of every command."""

    def answer(self, command: Document) -> Document:
        """The reply to one command."""
        name = next(iter(command))
        self.commands.append(name)
        if command.get("startTransaction"):
            self._before[command["lsid"]["id"]] = copy.deepcopy(self.data)
        handler = getattr(self, f"_{name.lower()}", None)
        if handler is None:
            return {"ok": 0.0, "code": 59, "errmsg": f"no such command: {name}"}
        return {"ok": 1.0, **handler(command)}

    def _hello(self, command: Document) -> Document:
        limits = {"maxBsonObjectSize": 1 << 24, "maxMessageSizeBytes": 48_000_000, "maxWriteBatchSize": 100_000}
        about = {
            "isWritablePrimary": True,
            "ismaster": True,
            "helloOk": True,
            "minWireVersion": 0,
            "maxWireVersion": 21,
        }
        hosts = {"setName": self.replica_set, "hosts": [self.address], "primary": self.address, "me": self.address}
        return {**about, **limits, "logicalSessionTimeoutMinutes": 30, **(hosts if self.replica_set else {})}

    _ismaster = _hello

    def _ping(self, command: Document) -> Document:
        return {}

    _endsessions = _committransaction = _ping

    def _aborttransaction(self, command: Document) -> Document:
        self.data = self._before.pop(command["lsid"]["id"], self.data)
        return {}

    def _listcollections(self, command: Document) -> Document:
        found = [{"name": name, "type": "collection", "options": {}} for name in self.data]
        return {"cursor": {"id": 0, "ns": "x.$cmd.listCollections", "firstBatch": found}}

    def _create(self, command: Document) -> Document:
        self.data.setdefault(command["create"], [])
        return {}

    def _createindexes(self, command: Document) -> Document:
        self.unique.setdefault(command["createIndexes"], []).extend(
            list(index["key"]) for index in command["indexes"] if index.get("unique")
        )
        return {}

    def _insert(self, command: Document) -> Document:
        errors, count = [], 0
        for index, document in enumerate(command["documents"]):
            if problem := self._duplicate(command["insert"], document):
                errors.append({"index": index, "code": _DUPLICATE, "errmsg": problem})
                if command.get("ordered", True):
                    break
                continue
            self._documents(command["insert"]).append(document)
            count += 1
        return {"n": count, **({"writeErrors": errors} if errors else {})}

    def _find(self, command: Document) -> Document:
        found = self._matching(command["find"], command.get("filter") or {})
        found = _sorted(found, command.get("sort"))[command.get("skip", 0) :]
        found = found[: command["limit"]] if command.get("limit") else found
        return {"cursor": {"id": 0, "ns": f"x.{command['find']}", "firstBatch": copy.deepcopy(found)}}

    def _aggregate(self, command: Document) -> Document:
        filters = [stage["$match"] for stage in command["pipeline"] if "$match" in stage]
        count = len(self._matching(command["aggregate"], {"$and": filters} if filters else {}))
        counted = [{"_id": 1, "n": count}] if count else []
        return {"cursor": {"id": 0, "ns": f"x.{command['aggregate']}", "firstBatch": counted}}

    def _update(self, command: Document) -> Document:
        matched, upserted = 0, []
        for index, each in enumerate(command["updates"]):
            found, inserted = self._change(command["update"], each["q"], each["u"], upsert=each.get("upsert", False))
            matched += 1
            if inserted:
                upserted.append({"index": index, "_id": found["_id"]})
        return {"n": matched, "nModified": matched - len(upserted), **({"upserted": upserted} if upserted else {})}

    def _findandmodify(self, command: Document) -> Document:
        name, query = command["findAndModify"], command["query"]
        found = _sorted(self._matching(name, query), command.get("sort"))[:1]
        if command.get("remove"):
            for document in found:
                self._documents(name).remove(document)
            return {"value": found[0] if found else None, "lastErrorObject": {"n": len(found)}}
        before = copy.deepcopy(found[0]) if found else None
        if not found and not command.get("upsert"):
            return {"value": None, "lastErrorObject": {"n": 0, "updatedExisting": False}}
        after, _ = self._change(name, query, command["update"], upsert=True)
        value = copy.deepcopy(after) if command.get("new") else before
        return {"value": value, "lastErrorObject": {"n": 1, "updatedExisting": bool(found)}}

    def _delete(self, command: Document) -> Document:
        count = 0
        for each in command["deletes"]:
            found = self._matching(command["delete"], each["q"])
            for document in found[:1] if each.get("limit") else found:
                self._documents(command["delete"]).remove(document)
                count += 1
        return {"n": count}

    def _documents(self, name: str) -> list[Document]:
        return self.data.setdefault(name, [])

    def _matching(self, name: str, query: Document) -> list[Document]:
        return [document for document in self._documents(name) if _matches(document, query)]

    def _duplicate(self, name: str, new: Document) -> str:
        for keys in [["_id"], *self.unique.get(name, [])]:
            value = [new.get(key) for key in keys]
            if any([old.get(key) for key in keys] == value for old in self._documents(name) if old is not new):
                return f"E11000 duplicate key error: {name} {keys}"
        return ""

    def _change(self, name: str, query: Document, update: Document, *, upsert: bool) -> tuple[Document, bool]:
        found = self._matching(name, query)[:1]
        if not found and not upsert:
            return {}, False
        new = not found
        equal = {key: value for key, value in query.items() if not key.startswith("$") and not isinstance(value, dict)}
        document = found[0] if found else {"_id": bson.ObjectId(), **equal}
        if new:
            self._documents(name).append(document)
        if not any(key.startswith("$") for key in update):
            kept = document["_id"]
            document.clear()
            document |= {"_id": kept, **update}
            return document, new
        for operator, changes in update.items():
            for key, value in changes.items():
                if operator == "$set" or (operator == "$setOnInsert" and new):
                    document[key] = value
                elif operator == "$inc":
                    document[key] = document.get(key, 0) + value
                elif operator == "$max":
                    document[key] = max(document.get(key, value), value)
                elif operator != "$setOnInsert":
                    raise NotImplementedError(operator)
        return document, new


def _matches(document: Document, query: Document) -> bool:
    for key, wanted in query.items():
        if key in ("$and", "$or"):
            if not (all if key == "$and" else any)(_matches(document, each) for each in wanted):
                return False
        elif isinstance(wanted, dict) and any(name.startswith("$") for name in wanted):
            value = document.get(key)
            checks = {
                "$in": lambda operand, value=value: value in operand,
                "$eq": lambda operand, value=value: value == operand,
                "$ne": lambda operand, value=value: value != operand,
                "$regex": lambda operand, value=value: isinstance(value, str) and re.search(operand, value) is not None,
                "$options": lambda operand: True,
            }
            if not all(checks[name](operand) for name, operand in wanted.items()):
                return False
        elif document.get(key) != wanted:
            return False
    return True


def _sorted(documents: list[Document], sort: Document | None) -> list[Document]:
    for key, direction in reversed(list((sort or {}).items())):
        documents = sorted(
            documents, key=lambda each, key=key: (each.get(key) is not None, each.get(key)), reverse=direction < 0
        )
    return documents


@asynccontextmanager
async def fake_mongo(server: FakeMongo) -> AsyncIterator[str]:
    """Serve ``server``; yields the URI of a MongoDB."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                length, request, _, operation = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                body = await reader.readexactly(length - _HEADER.size)
                if operation == _OP_QUERY:  # the first hello of a connection
                    start = body.index(b"\0", 4) + 1 + 8
                    reply = struct.pack("<iqii", 8, 0, 0, 1) + bson.encode(server.answer(bson.decode(body[start:])))
                    code = _OP_REPLY
                else:
                    reply = struct.pack("<iB", 0, 0) + bson.encode(server.answer(_command(body)))
                    code = _OP_MSG
                writer.write(_HEADER.pack(_HEADER.size + len(reply), 0, request, code) + reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    server.address = f"127.0.0.1:{port}"
    try:
        yield f"mongodb://{server.address}/?" + (f"replicaSet={server.replica_set}" if server.replica_set else "")
    finally:
        listening.close()


def _command(body: bytes) -> Document:
    """The command of an OP_MSG: its first section, and the sequences of documents that follow it."""
    place, command, sequences = 4, Document(), Document()
    while place < len(body):
        kind, place = body[place], place + 1
        (size,) = struct.unpack_from("<i", body, place)
        section = body[place : place + size]
        if kind == 0:
            command = bson.decode(section)
        else:
            end = section.index(b"\0", 4)
            sequences[section[4:end].decode()] = bson.decode_all(section[end + 1 :])
        place += size
    return {**command, **sequences}
