"""Settings of workers that read pages of others."""

from __future__ import annotations

from baton.settings.base import Settings


class LinkSettings(Settings):
    """How a worker asks those whose pages it reads."""

    link_sessions: bool = True
    """Ask each worker whose pages this one reads in one session: a broken connection is a pause, and ends no import.
    Without it, and with workers that do not serve it, a handoff has gRPC calls."""
