"""All files that others may read have the mode of the umask, whoever writes them."""

from __future__ import annotations

from pathlib import Path

from programs import run

WRITERS = """
import os, sys
from pathlib import Path
os.umask(0o002)
from groundwire.domains.spider import schema_files
from groundwire.rewards.judge.cache import JudgeCache
from groundwire.tools.variants.fuzz import write_database
from groundwire.tools.variants.tables import Schema
from groundwire.train.store.sqlite import SqliteStore

folder = Path(sys.argv[1])
script = folder / "database" / "pets" / "schema.sql"
script.parent.mkdir(parents=True)
script.write_text("CREATE TABLE pet (name)")
schema_files.CACHE = folder / "cache"
schema_files.build(script)
JudgeCache(str(folder / "judge.db")).store("key", model="m", reply="1")
write_database(folder / "variant.sqlite", Schema(()), {})
SqliteStore(folder / "store.db").close()
"""


def test_databases_that_we_make_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    done = run("-c", WRITERS, str(tmp_path))
    assert done.returncode == 0, done.stderr
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == dict.fromkeys(["schema.sql", "pets.sqlite", "judge.db", "variant.sqlite", "store.db"], 0o664)
