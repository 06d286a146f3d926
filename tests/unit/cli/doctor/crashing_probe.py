"""A probe that misbehaves as its argument says. Run by `test_probes.py` as a child."""

import os
import signal
import sys

if sys.argv[1] == "crash":
    os.kill(os.getpid(), signal.SIGILL)
if sys.argv[1] == "hang":
    signal.pause()
if sys.argv[1] == "chatter":
    sys.stdout.write('UCX says hello\nmark {"a": 1}\n')
if sys.argv[1] == "complain":
    sys.exit("no such library")
