"""The domain registry."""

from __future__ import annotations

from collections.abc import Callable

from groundwire.domains._types import Domain, as_domain
from groundwire.domains.task_list import is_file, task_list
from groundwire.tools.plugins import PluginError, Registry, hookimpl

_registry: Registry[Domain] = Registry("domain", hook="register_domains", builtin=__name__)
names = _registry.names


def get(name: str) -> Domain:
    """The domain ``name``, or that of the tasks in the file ``name``, a fifth of which is held out.

    Raises :class:`groundwire.tools.plugins.UnknownNameError`, :class:`groundwire.tools.plugins.PluginError`, and
    :class:`groundwire.domains.DataError` for a file.
    """
    if name not in _registry.names() and is_file(name):
        return task_list(name)
    try:
        return as_domain(_registry.get(name), name)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"domain {name!r} cannot be imported: {error}") from error


@hookimpl
def register_domains(register: Callable[[str, str], None]) -> None:
    """Text-to-SQL on Spider, BIRD and any folder of databases; questions on medicine answered in prose."""
    register("bird", "groundwire.domains.bird:domain")
    register("medical", "groundwire.domains.medical:domain")
    register("spider", "groundwire.domains.spider.loader:domain")
    register("sqlite", "groundwire.domains.sqlite:domain")
