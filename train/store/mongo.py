"""Agent Lightning's MongoDB store, as a store that outlives its process.

Its own command line gives every start a partition of its own, so that a store that is started again has forgotten all;
here the partition is always the same, and the database is the one that the URI names. MongoDB is asked at once whether
it is there and can do what the store needs: Agent Lightning would find out at the first request, half a minute late.
"""

from __future__ import annotations

from typing import Any

from agentlightning.store.mongo import MongoLightningStore
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from groundwire.train.store.ended_attempts import IgnoreLateSpans
from groundwire.train.store.errors import MongoStoreError

__all__ = ["MongoStore"]

_ANSWER_MS = 2000
_DATABASE, _PARTITION = "agentlightning", "groundwire"


class MongoStore(IgnoreLateSpans, MongoLightningStore):
    """A store in the database that ``uri`` names (``agentlightning`` where it names none).

    Raises :class:`MongoStoreError`, within about two seconds.
    """

    def __init__(self, uri: str) -> None:
        super().__init__(mongo_uri=uri, database_name=_checked(uri), partition_id=_PARTITION)


def _checked(uri: str) -> str:
    """The name of the database to use."""
    try:
        client: MongoClient[dict[str, Any]] = MongoClient(
            uri, serverSelectionTimeoutMS=_ANSWER_MS, connectTimeoutMS=_ANSWER_MS
        )
        with client:
            server = client.admin.command("hello")
            name = client.get_default_database(_DATABASE).name
            client[name].command("ping")  # unlike hello, it needs to be logged in
    except (PyMongoError, ValueError, TypeError) as error:
        # Not the URI itself, which may hold a password, nor the driver's description of the whole topology.
        why = str(error).partition(" (configured timeouts")[0].partition(", Timeout:")[0]
        raise MongoStoreError(f"--mongo: MongoDB cannot be used: {why}") from error
    if "setName" not in server and server.get("msg") != "isdbgrid":
        raise MongoStoreError(
            "--mongo: MongoDB runs alone, and transactions need a replica set: start mongod with --replSet rs0, run "
            "rs.initiate() in its shell, and give mongodb://HOST:PORT/?replicaSet=rs0"
        )
    return name
