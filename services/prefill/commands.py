"""Commands to the prefill engine, sent through its mailbox, and the events that it returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.domain.handoff import PublishedChunk
from baton.domain.request import EngineRequest
from baton.engine.handoff.export_commands import ExportCommand
from baton.engine.handoff.export_events import ExportEnded, ExportExpired, Seal
from baton.engine.handoff.import_commands import PageImportCommand
from baton.engine.handoff.page_imports import PageImportEffect
from baton.engine.handoff.page_source import PageSource
from baton.engine.messages import Abort, Fail, Scored
from baton.services.prefill.prompt import Progress
from baton.transfer.base import PullEvent
from baton.worker.budget_control import ChangeBudgets
from baton.worker.media.media_receiver import MediaCommand


@dataclass(slots=True)
class PromptCall:
    """A `Prefill` call, of the engine thread. `refused`: it has begun nothing, so its end ends nothing."""

    refused: bool = False


@dataclass(frozen=True, slots=True)
class AddPrompt:
    """A new prompt, received at `received_at`. `deadline_s` counts from when the engine takes the command.

    `source`: a linked worker that has cached pages of it. `num_coming`: prompts that its router was about to send.
    """

    request: EngineRequest
    decode_prefix_len: int
    deadline_s: float
    received_at: float
    source: PageSource | None = None
    num_coming: int = 0
    call: PromptCall = field(default_factory=PromptCall, compare=False)


@dataclass(frozen=True, slots=True)
class EndPromptCall:
    """The router has closed the stream of `added` before its seal: ends the attempt, unless the call was refused.

    It may have repeated another call of the attempt, which goes on.
    """

    added: AddPrompt
    reason: str


@dataclass(frozen=True, slots=True)
class TierEnded:
    """A read or write of the file tier has ended: ends the wait for commands."""


PrefillCommand = (
    AddPrompt
    | EndPromptCall
    | ChangeBudgets
    | Abort
    | ExportCommand
    | MediaCommand
    | PageImportCommand
    | PullEvent
    | TierEnded
)


PrefillEvent = PublishedChunk | Progress | Scored | Seal | Fail | ExportExpired | ExportEnded | PageImportEffect
