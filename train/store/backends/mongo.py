"""Agent Lightning's MongoDB store, kept across restarts.

``agl store`` uses a new partition at each start, so a restarted store is empty. Here the partition is constant, and the
URI names the database. MongoDB is checked at once: Agent Lightning would report a problem only after 30 seconds.
"""

from __future__ import annotations

from typing import Any

from agentlightning.store.mongo import MongoLightningStore
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from groundwire.train.store.backends.base import IgnoreLateChanges
from groundwire.train.store.errors import MongoStoreError

__all__ = ["MongoStore"]

_TIMEOUT_MS = 2000
_DATABASE, _PARTITION = "agentlightning", "groundwire"


class MongoStore(IgnoreLateChanges, MongoLightningStore):
    """A store in the database that ``uri`` names (default: ``agentlightning``).

    Raises :class:`MongoStoreError`, within about two seconds.
    """

    def __init__(self, uri: str) -> None:
        super().__init__(mongo_uri=uri, database_name=_database_name(uri), partition_id=_PARTITION)


def _database_name(uri: str) -> str:
    """Check that MongoDB answers and supports transactions; returns the name of the database."""
    try:
        client: MongoClient[dict[str, Any]] = MongoClient(
            uri, serverSelectionTimeoutMS=_TIMEOUT_MS, connectTimeoutMS=_TIMEOUT_MS
        )
        with client:
            server = client.admin.command("hello")
            name = client.get_default_database(_DATABASE).name
            client[name].command("ping")  # unlike hello, this needs a valid login
    except (PyMongoError, ValueError, TypeError) as error:
        # Without the URI, which may contain a password, and without the driver's description of the topology.
        reason = str(error).partition(" (configured timeouts")[0].partition(", Timeout:")[0]
        raise MongoStoreError(f"--mongo: MongoDB cannot be used: {reason}") from error
    if "setName" not in server and server.get("msg") != "isdbgrid":
        raise MongoStoreError(
            "--mongo: this MongoDB is a single server, but transactions need a replica set: start mongod with "
            "--replSet rs0, run rs.initiate() in its shell, and give mongodb://HOST:PORT/?replicaSet=rs0"
        )
    return name
