"""How a process that is ready to be timed waits until the device is its alone; `crowd.py` gives the turns."""

from __future__ import annotations

import socket


def take_turn(turn: tuple[str, int]) -> None:
    """Of a process that is ready: say so, and wait to be told that the device is its alone.

    Raises: RuntimeError where the ladder is gone.
    """
    name, place = turn
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(name)
        line.sendall(str(place).encode())
        if not line.recv(1):
            raise RuntimeError("the ladder ended before this process was timed.")
