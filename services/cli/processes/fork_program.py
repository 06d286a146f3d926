"""The program of `ServiceForkServer`: imports what services share once, and forks each service.

    python -m baton.services.cli.processes.fork_program SOCKET PARENT SERVICES PADDING

It starts no thread and uses no library that keeps state of a process (gRPC, NIXL, CUDA): a fork would inherit half of
it. A request is one message of JSON, `["serve", "prefill", ...]`, the words of a `baton` command, with two descriptors:
the log, and a socket on which the new process waits for a byte. The answer is `{"pid": 7}` or `{"why": "..."}`, and may
have `"kernels"`: why there are no native ones. A message with one descriptor gives this program a log; `{}` answers it.

`SERVICES`, separated by commas, are imported before a request comes.

The new process is no child of this one but of the supervisor, `PARENT`, which adopts orphans. So a service outlives
this program, ends with the supervisor, and is watched by it alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import mmap
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from baton.services.cli import main as command
from baton.services.cli.errors import EXPECTED_ERRORS
from baton.services.cli.main import Call
from baton.services.cli.processes.die_with_parent import end_with_parent
from baton.services.cli.processes.shown_arguments import make_room, set_arguments
from baton.settings.base import SettingsError
from baton.settings.model_source import resolve_model
from baton.settings.process import end_process, limit_threads, trim_heap

MAX_REQUEST_BYTES = 65536
NUM_DESCRIPTORS = 2
MODEL_FLAG = "--model="
GENERATING = frozenset({"prefill", "decode"})
"""Services that mask tokens by grammars."""
KERNELS = "baton.model.loading.kernel_choice"
_CODE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-xp .* /.*\n((?:[A-Z].*\n)+)", re.MULTILINE)
"""A mapping of a file's code in `/proc/self/smaps`: its first address, its end, its fields."""
_UNCHANGED = (re.compile(r"^Anonymous: +0 kB", re.MULTILINE), re.compile(r"^Swap: +0 kB", re.MULTILINE))
"""What a mapping has without pages of its own: changed ones are anonymous, and not counted so once swapped out."""


def main() -> None:
    """The program of a started process."""
    descriptor, parent, services, _padding = sys.argv[1:]
    run(int(descriptor), int(parent), list(filter(None, services.split(","))))


def run(descriptor: int, parent: int, services: Sequence[str], num_bytes: int = 0) -> None:
    """Serves until the supervisor closes the socket, or in a new process runs its command to the process's end.

    `num_bytes`: room for arguments that this process was not started with.
    """
    if num_bytes:
        make_room(num_bytes)
    set_arguments((sys.executable, "-m", "baton.services.cli.processes.fork_program"))
    requests = socket.socket(fileno=descriptor)
    requests.send(b"{}")
    gc.disable()  # imports leave no garbage worth three passes over all of it
    limit_threads(1)  # of libraries that start them when they are loaded: a service sets its own number
    shared = SharedParts()  # lives to the end of each fork
    for service in services:
        shared.import_service(service)
    forked = serve(requests, parent, shared)
    if forked is not None:
        gc.enable()
        sys.argv = [command.__file__, *forked.words]
        end_process(command.run(forked.words, forked.call))


@dataclass(frozen=True, slots=True)
class ForkedCommand:
    """What a new process runs. `call`: what its words ask for; None if they cannot be read."""

    words: Sequence[str]
    call: Call | None


class SharedParts:
    """What services have in common: modules, checked kernels, the vocabulary for grammars.

    Each part is made for the first service that needs it. So a router is forked before PyTorch is imported.
    """

    def __init__(self) -> None:
        self._prepared: set[str] = set()
        self._kept: list[object] = []
        self.kernels = ""
        """Why workers have no native kernels; empty if they have some, or nobody has looked."""

    def prepare(self, words: Sequence[str]) -> None:
        """Makes what the service of a command needs, on this thread alone. Raises `ImportError`."""
        service, *flags = words[1:]
        if service in self._prepared:
            return
        self.import_service(service)
        if (kernels := sys.modules.get(KERNELS)) is not None:
            importlib.import_module("baton.model.cpu").configure_threads(1)  # a service sets its own number
            choice = kernels.best_kernels()
            self.kernels = choice.note if choice.kernels is None else ""
        if service in GENERATING and not self._kept:
            self._kept += vocabulary(flags)
        self._prepared.add(service)
        gc.freeze()  # a collection in a fork would copy the pages of all these objects
        trim_heap()  # a fork that uses free memory among shared pages would copy them
        release_code_pages()

    def import_service(self, service: str) -> None:
        """Imports the modules of a service. Raises `ImportError`."""
        importlib.import_module(f"baton.services.{service}.app")


def vocabulary(flags: Sequence[str]) -> list[object]:
    """The vocabulary of the model named in `flags`, which a worker with that model finds; none if there is none."""
    grammars = importlib.import_module("baton.grammar.tokenizer")
    names = [flag.removeprefix(MODEL_FLAG) for flag in flags if flag.startswith(MODEL_FLAG)]
    try:
        directory = resolve_model(names[-1], download=False)  # `baton up` has it by now, and others wait
        size = grammars.logits_size(directory)
        return [] if size is None else [grammars.GrammarTokenizer.of_directory(directory, size)]
    except (IndexError, OSError, ValueError, SettingsError):
        return []  # the worker tells what it lacks


def serve(requests: socket.socket, parent: int, shared: SharedParts) -> ForkedCommand | None:
    """Answers requests. Returns None once there are no more, and in a new process its command."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, NUM_DESCRIPTORS)
        if not message:
            return None
        if len(descriptors) == 1:
            write_to(*descriptors)
            requests.send(b"{}")
            continue
        log, start = descriptors
        words = json.loads(message)
        shared.prepare(words)
        service = read_command(words)
        try:
            pid = fork_orphan()
        except OSError as error:
            answer: dict[str, object] = {"why": str(error)}
        else:
            if pid == 0:
                requests.close()
                become(words, parent, log, start)
                return service
            answer = {"pid": pid, **({"kernels": shared.kernels} if shared.kernels else {})}
        os.close(log)
        os.close(start)
        requests.send(json.dumps(answer).encode())


def read_command(words: Sequence[str]) -> ForkedCommand:
    """Reads a command line here: to look at the types of all flags a fork would copy the pages of their classes."""
    try:
        call = command.parse(words)
    except EXPECTED_ERRORS:  # the fork tells what is wrong with it
        call = None
    gc.collect()  # of objects since the last freeze alone: garbage among them would stay for good
    gc.freeze()
    return ForkedCommand(tuple(words), call)


def fork_orphan() -> int:
    """Forks a process whose parent ends at once. Returns its pid; in the new process 0. Raises `OSError`."""
    if (num_threads := len(os.listdir("/proc/self/task"))) != 1:
        raise OSError(errno.EDEADLK, f"{num_threads - 1} threads run in the fork server, and would be lost in a fork")
    told, tell = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(told)
        os.close(tell)
        raise
    if between == 0:
        pid = -errno.EAGAIN
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        finally:
            if pid != 0:
                _tell_and_end(tell, pid)
        os.close(told)
        os.close(tell)
        return 0
    os.close(tell)
    os.waitpid(between, 0)  # now its child has been adopted
    with os.fdopen(told) as answer:
        pid = int(answer.read() or -errno.EAGAIN)
    if pid < 0:
        raise OSError(-pid, f"the second fork failed: {os.strerror(-pid)}")
    return pid


def _tell_and_end(tell: int, pid: int) -> NoReturn:
    """Ends the process between, also where nobody reads what it tells: it must not answer requests, too."""
    try:
        os.write(tell, str(pid).encode())
    finally:
        os._exit(0)


def become(words: Sequence[str], parent: int, log: int, start: int) -> None:
    """Makes a new process what the supervisor would have started: group, output, arguments, end with its parent.

    Ends it if the supervisor has gone, or does not know its pid.
    """
    os.setpgid(0, 0)
    write_to(log)
    if not os.read(start, 1):
        os._exit(1)
    os.close(start)
    end_with_parent(parent, signal.SIGTERM)
    set_arguments((sys.executable, "-m", command.__name__, *words))


def release_code_pages() -> None:
    """Gives back the pages of code that imports have run: this process runs little of it again, a fork what it needs.

    The mappings stay: the kernel keeps the pages of the files, and fills in those that are used again. Code that was
    changed keeps its pages. No effect where `/proc/self/smaps` cannot be read.
    """
    libc = ctypes.CDLL(None)
    with contextlib.suppress(OSError):
        smaps = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
        for start, end in unchanged_code(smaps):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def unchanged_code(smaps: str) -> list[tuple[int, int]]:
    """First address and end of each mapping of a file's code that has the file's pages alone."""
    found = _CODE.findall(smaps)
    kept = [one for one in found if all(field.search(one[2]) for field in _UNCHANGED)]
    return [(int(first, 16), int(last, 16)) for first, last, _ in kept]


def write_to(log: int) -> None:
    """Has the standard streams of this process end in an open file, which is closed here."""
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)


if __name__ == "__main__":
    main()
