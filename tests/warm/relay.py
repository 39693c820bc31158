"""What a test sees of a process that runs in a fork: its streams, its signals and its end.

A copy of this lies beside the template's door and is called as Python is: `-c CODE`, `-m MODULE` or a file, with
arguments. What begins with another option is run by Python itself.
"""

import json
import os
import resource
import signal
import socket
import sys
from types import FrameType

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    if len(sys.argv) < 2 or (sys.argv[1][:1] == "-" and sys.argv[1] not in ("-c", "-m")):
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    request = {
        "args": sys.argv[1:],
        "env": [[os.fsdecode(name), os.fsdecode(value)] for name, value in os.environb.items()],
        "folder": os.getcwd(),
        "umask": _umask(),
        "streams": [number for number in (0, 1, 2) if _is_open(number)],
        "ignored": [number for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN],
    }
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(os.path.join(os.path.dirname(os.path.abspath(__file__)), "door"))
        said = json.dumps(request).encode()
        socket.send_fds(door, [len(said).to_bytes(8, "big")], request["streams"])
        door.sendall(said)
        answers = door.makefile("rb")
        child = int(answers.readline())

        def forward(number: int, frame: FrameType | None) -> None:
            os.kill(child, number)

        for number in FORWARDED:
            if number not in request["ignored"]:
                signal.signal(number, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        answer = answers.readline()
    if not answer:
        raise SystemExit("tests/warm: the template is gone")
    status = int(answer)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_open(number: int) -> bool:
    """Asked before anything is opened here, which might get the number of a stream that is not there."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


main()
