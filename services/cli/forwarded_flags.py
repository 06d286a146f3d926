"""Flags that `baton up` hands on to the services that know them: every one that it does not decide itself.

The fields come from the services' settings, so that a new setting is a flag of `baton up`, too. A flag that is not
given is not handed on, and each service has its own default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Group, Parameter
from pydantic import create_model
from pydantic.fields import FieldInfo

from baton.services.decode.settings import DecodeSettings
from baton.services.encode.settings import EncodeSettings
from baton.services.prefill.settings import PrefillSettings
from baton.services.router.settings import RouterSettings
from baton.settings.base import Settings
from baton.settings.groups import ServiceSettings

SERVICES: Final[Mapping[str, type[ServiceSettings]]] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "encode": EncodeSettings,
}
"""Settings of `baton serve NAME`."""

DECIDED = frozenset(
    {
        "worker_id",
        "metrics_port",
        "advertise_address",
        "page_port",
        "advertise_page_address",
        "session_port",
        "advertise_session_address",
        "cpu_affinity",
        "demo_socket",
        "core_lease_file",
    }
)
"""Fields whose values differ between the processes of one system."""

ONLY_FOR = {"token_budget": "prefill"}
"""Fields of several services that go to one of them; `--decode-token-budget` is the other's."""


_GROUP = Group("Handed on to the services, which have their own defaults", sort_key=1)


def receivers(name: str) -> tuple[str, ...]:
    """The services that a forwarded flag goes to."""
    if name in ONLY_FOR:
        return (ONLY_FOR[name],)
    return tuple([service for service, model in SERVICES.items() if name in model.model_fields])


def _forwarded_fields() -> dict[str, Any]:
    """Name, type and help of every field, without a default: None is "not given"."""
    fields: dict[str, Any] = {}
    for model in SERVICES.values():
        for name, source in model.model_fields.items():
            if name not in fields and name not in DECIDED:
                owner = SERVICES[receivers(name)[0]]
                fields[name] = _optional(owner.model_fields[name], receivers(name), source)
    return fields


def _optional(field: FieldInfo, services: tuple[str, ...], source: FieldInfo) -> tuple[Any, FieldInfo]:
    kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    scope = "" if len(services) == len(SERVICES) else f" Goes to: {', '.join(services)}."
    help_text = f"{field.description or source.description}{scope}"
    return Annotated[kind | None, Parameter(group=_GROUP)], FieldInfo(default=None, description=help_text)


if TYPE_CHECKING:

    class ForwardedFlags(Settings):
        """Every field of the services, without a default."""

        ui: bool | None = None
else:
    ForwardedFlags = create_model("ForwardedFlags", __base__=Settings, __module__=__name__, **_forwarded_fields())


def flags_for(service: str, settings: ForwardedFlags) -> dict[str, Any]:
    """The given flags that `service` gets."""
    return {
        name: value
        for name in _forwarded_fields()
        if (value := getattr(settings, name)) is not None and service in receivers(name)
    }


def as_words(flags: Mapping[str, Any]) -> list[str]:
    """Command line words: `--page-size=16`, `--no-digests`."""
    return [_word(name.replace("_", "-"), value) for name, value in flags.items()]


def _word(flag: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"
