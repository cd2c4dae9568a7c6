"""``python -m groundwire`` is the command ``groundwire``."""

from groundwire.train.cli.app import app

app(prog_name="groundwire")
