"""``python -m groundwire.domains.spider.prepare``: as ``groundwire prepare``, for Spider."""

from __future__ import annotations

from groundwire.domains.prepare import app
from groundwire.domains.spider.loader import domain

prepare = domain.prepare

if __name__ == "__main__":
    app()
