"""Small programs around mpirun between two machines: run without torch, they start in no time.

rdma_launch.py serve PORT            runs the commands that an agent sends, one each time
rdma_launch.py agent PORT HOST …     what mpirun calls in place of ssh: has the command run at HOST
rdma_launch.py "hand over" PATH      what mpirun starts as a rank: gives its environment to the runner, ends as it says
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time


def serve(port: int) -> None:
    """Run what comes, until killed. The wire between the machines has no other end."""
    with socket.create_server(("", port)) as door:
        while True:
            caller, _ = door.accept()
            command = caller.makefile().readline()
            output = caller.fileno()
            subprocess.Popen(command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            caller.close()


def ask(port: int, host: str, command: str) -> None:
    """Have a command run at a host, and say what it says until it ends."""
    for _ in range(200):
        try:
            door = socket.create_connection((host, port))
            break
        except OSError:
            time.sleep(0.1)
    door.sendall(command.encode() + b"\n")
    while said := door.recv(4096):
        os.write(1, said)


def hand_over(path: str) -> None:
    """Let the runner be this rank."""
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(path)
        mine = {name: value for name, value in os.environ.items() if name.startswith(("PMIX", "OMPI", "PRTE", "UCX"))}
        door.sendall(json.dumps(mine).encode() + b"\n")
        status = door.makefile().readline().strip()
    sys.exit(0 if status == "0" else 1)


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    if what == "serve":
        serve(int(where))
    elif what == "agent":
        ask(int(where), rest[0], " ".join(rest[1:]))
    else:
        hand_over(where)
