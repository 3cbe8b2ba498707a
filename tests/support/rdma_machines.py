"""Boots two virtual machines with Soft-RoCE that share this machine's files, and runs a command in both.

They are plain QEMU, so no hardware support is needed; a stock Debian kernel, started with a small root of its own,
mounts this machine's root read-only with a layer in memory above it. So the project's own virtual environment runs in
there, on two hosts with real RDMA verbs between them.

As a script: `python rdma_machines.py FOLDER SECONDS COMMAND…` leaves what the machines say under FOLDER.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ["qemu-system-x86", "busybox-static", "ibverbs-providers", "python3-pyverbs", "kmod", "cpio", "iproute2"]
TOOLS = ["qemu-system-x86_64", "busybox", "cpio", "depmod", "rdma", "tc"]
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
MEMORY_MIB = 2560
_MODULES = [
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtio_net",
    "crc32_generic",
    "rdma_rxe",
    "rdma_ucm",
    "sch_netem",
]
_MODULE_FOLDERS = [
    "kernel/drivers/infiniband/core",
    "kernel/drivers/infiniband/sw/rxe",
    "kernel/crypto",
    "kernel/drivers/virtio",
    "kernel/drivers/net",
    "kernel/net/9p",
    "kernel/fs/9p",
    "kernel/fs/netfs",
    "kernel/fs/fscache",
    "kernel/fs/overlayfs",
    "kernel/fs/configfs",
    "kernel/net/core",
    "kernel/net/ipv4",
    "kernel/net/ipv6",
    "kernel/net/sched",
    "kernel/lib",
]

_INIT = """#!/bin/busybox sh
B=/bin/busybox
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
while read module; do $B insmod /modules/$module || echo "module $module does not load"; done < /modules/order
options=trans=virtio,version=9p2000.L,msize=512000
$B mount -t 9p -o ro,$options,cache=loose root /below && $B mount -t tmpfs tmpfs /above &&
    $B mkdir /above/upper /above/work &&
    $B mount -t overlay -o lowerdir=/below,upperdir=/above/upper,workdir=/above/work overlay /new ||
    { echo "no root"; $B poweroff -f; }
for each in proc sys dev; do $B mount --move /$each /new/$each; done
$B mkdir -p /new/out /new/dev/shm /new/dev/pts
$B mount -t 9p -o $options,cache=none out /new/out
exec $B switch_root /new /bin/bash /out/boot
"""
_VERSION = hashlib.sha256(repr((_INIT, _MODULES, _MODULE_FOLDERS)).encode()).hexdigest()[:12]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "freescale-rdma-machines" / _VERSION

_BOOT = """
mount -t tmpfs tmpfs /dev/shm; mount -t devpts devpts /dev/pts; mount -t tmpfs tmpfs /run
ulimit -l unlimited; ulimit -n 65536
hostname machine$MACHINE; ip link set lo up
printf '127.0.0.1 localhost\\n10.77.0.1 machine0\\n10.77.0.2 machine1\\n' > /etc/hosts
echo 'hosts: files' > /etc/nsswitch.conf  # there is no name server to wait for
ip link set eth0 mtu 4200 up; ip addr add 10.77.0.$((MACHINE + 1))/24 dev eth0
rdma link add rxe0 type rxe netdev eth0
setsid timeout -k 5 $SECONDS_LEFT bash -c "$COMMAND" > /out/log 2>&1 < /dev/null
echo $? > /out/status
cat /proc/uptime > /out/uptime
sync; echo o > /proc/sysrq-trigger; sleep 9
"""


class CannotBoot(Exception):
    """There is no way to start the machines here; says what is missing."""


@dataclass(frozen=True)
class Ended:
    """What became of one machine.

    Attributes:
        status: Exit status of the command; None when the machine never reported.
        log: What the command said.
        console: What the kernel said.
        folder: `/out` of the machine.
    """

    status: int | None
    log: str
    console: str
    folder: Path

    def explain(self) -> str:
        """All of it, for an assertion's message."""
        return f"status {self.status}\n{self.log[-6000:]}\n--- console\n{self.console[-1500:]}"


def prepare() -> None:
    """Install and build what the machines need, once.

    Raises:
        CannotBoot: Something is missing and this process may not, or cannot, install it.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or not Path("/usr/lib/x86_64-linux-gnu/libibverbs").is_dir():
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise CannotBoot(
                f"not installed: {', '.join(missing) or 'ibverbs-providers'}; as root on Debian or Ubuntu "
                f"it would be; by hand: apt install {' '.join(PACKAGES)}"
            )
        _run(["apt-get", "update", "-qq"], timeout_s=120)
        _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES], timeout_s=300)
    if not ((CACHE / "vmlinuz").exists() and (CACHE / "initrd.gz").exists()):
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            _build(Path(folder))


def _run(command: Sequence[str], *, timeout_s: float, cwd: Path | None = None, stdin: bytes = b"") -> str:
    variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=variables, input=stdin, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CannotBoot(f"{shlex.join(command)} took longer than {timeout_s:g} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise CannotBoot(f"{shlex.join(command)} failed: {said[-300:]}")
    return done.stdout.decode(errors="replace")


def _build(folder: Path) -> None:
    """Make kernel and first root from Debian's kernel package."""
    depends = _run(["apt-cache", "depends", "linux-image-amd64"], timeout_s=100)
    package = next((w for w in depends.split() if w.startswith("linux-image-") and w != "linux-image-amd64"), None)
    if package is None:
        raise CannotBoot("apt knows no linux-image-amd64, Debian's kernel")
    _run(["apt-get", "download", "-q", package], timeout_s=200, cwd=folder)
    archive = next(folder.glob(f"{package}_*.deb"))
    wanted = " ".join(f"'./lib/modules/*/{each}*'" for each in ("modules.", *(f"{each}/" for each in _MODULE_FOLDERS)))
    unpack = f"dpkg-deb --fsys-tarfile {archive.name} | tar x -C . --wildcards './boot/vmlinuz-*' {wanted}"
    _run(["bash", "-c", f'{unpack} 2>/dev/null || [ -n "$(ls boot)" ]'], timeout_s=120, cwd=folder)
    version = package.removeprefix("linux-image-")
    _run(["depmod", "-b", ".", version], timeout_s=60, cwd=folder)
    root = folder / "root"
    for each in ("bin", "modules", "proc", "sys", "dev", "below", "above", "new"):
        (root / each).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None, "checked before"
    shutil.copy(busybox, root / "bin")
    order: list[str] = []
    for module in _MODULES:
        try:
            said = _run(["modprobe", "-d", ".", "-S", version, "--show-depends", module], timeout_s=30, cwd=folder)
        except CannotBoot:
            continue  # part of this kernel, or of another name there; the machine says if it lacks something
        for line in said.splitlines():
            word, _, path = line.partition(" ")
            name = Path(path.split()[0]).name if word == "insmod" else ""
            if name and name not in order:
                order.append(name)
                shutil.copy(folder / path.split()[0], root / "modules")
    (root / "modules" / "order").write_text("\n".join(order) + "\n")
    (root / "init").write_text(_INIT)
    (root / "init").chmod(0o755)
    files = "\n".join(str(path.relative_to(root)) for path in [root, *sorted(root.rglob("*"))]).encode()
    packed = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"], cwd=root, input=files, capture_output=True, timeout=60, check=True
    ).stdout
    (folder / "initrd.gz").write_bytes(gzip.compress(packed, 1))
    next((folder / "boot").glob("vmlinuz-*")).rename(CACHE / "vmlinuz")
    (folder / "initrd.gz").rename(CACHE / "initrd.gz")


def run_in_both(
    command: str, folder: Path, *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run a shell command as root in two machines, joined by a wire, in this process's working folder.

    The machines know their number, 0 or 1, as MACHINE, reach each other as machine0 and machine1, and may write /out.

    Args:
        command: For bash.
        folder: Where /out of machine i is kept, as folder/i. Must exist.
        timeout_s: Deadline from power-on, in seconds. The machines are gone when this returns, whatever happens.
        environment: Variables for the command.
    """
    deadline = time.monotonic() + timeout_s
    socket = folder / "wire"
    machines: list[subprocess.Popen[bytes]] = []
    try:
        for number in (0, 1):
            out = folder / str(number)
            out.mkdir(exist_ok=True)
            variables = {**(environment or {}), "MACHINE": str(number), "SECONDS_LEFT": str(int(timeout_s) - 12)}
            _write_boot(out, command, variables)
            machines.append(_power_on(number, out, socket, timeout_s))
            while number == 0 and not socket.exists():
                if machines[0].poll() is not None or time.monotonic() > deadline:
                    raise CannotBoot(f"qemu does not start: {(out / 'qemu').read_text()[-300:]}")
                time.sleep(0.02)
        for machine in machines:
            machine.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        pass  # a machine without a status says so
    finally:
        for machine in machines:
            if machine.poll() is None:
                os.killpg(machine.pid, signal.SIGKILL)  # it and the `timeout` around it, a group of their own
            machine.wait(10)
    return [_read_end(folder / str(number)) for number in (0, 1)]


def _write_boot(out: Path, command: str, variables: Mapping[str, str]) -> None:
    kept = {"PATH": os.environ["PATH"], "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "COMMAND": command}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in {**kept, **variables}.items()]
    (out / "boot").write_text("\n".join([*exports, f"cd {shlex.quote(os.getcwd())}", _BOOT]))


def _power_on(number: int, out: Path, socket: Path, timeout_s: float) -> subprocess.Popen[bytes]:
    server = "on" if number == 0 else "off"
    options = [
        "-M q35 -accel tcg,thread=multi -cpu max -smp 1 -nodefaults -no-user-config -display none -no-reboot",
        f"-m {MEMORY_MIB} -serial file:{out}/console -kernel {CACHE}/vmlinuz -initrd {CACHE}/initrd.gz",
        "-virtfs local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap",
        f"-virtfs local,path={out},mount_tag=out,security_model=none",
        f"-netdev stream,id=wire,server={server},addr.type=unix,addr.path={socket}",
        f"-device virtio-net-pci,netdev=wire,mac=52:54:00:77:00:0{number}",
    ]
    kernel = ["-append", "console=ttyS0 quiet panic=-1 mitigations=off nokaslr"]
    # Should this process be killed, the machine still ends.
    command = ["timeout", "-s", "KILL", str(timeout_s + 5), "qemu-system-x86_64", *" ".join(options).split(), *kernel]
    with (out / "qemu").open("wb") as said:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)


def _read_end(out: Path) -> Ended:
    status, log, console = (
        path.read_text(errors="replace") if path.exists() else ""
        for path in (out / "status", out / "log", out / "console")
    )
    return Ended(int(status) if status.strip().isdigit() else None, log, console, out)


def link_pyverbs(folder: Path) -> bool:
    """Put the distribution's pyverbs, and nothing else, into a folder for PYTHONPATH, if this Python can use it."""
    version = f"cpython-{sys.version_info.major}{sys.version_info.minor}-"
    if not any(PYVERBS.glob(f"device.{version}*.so")):
        return False
    (folder / "pyverbs").symlink_to(PYVERBS)
    return True


if __name__ == "__main__":
    prepare()
    where = Path(sys.argv[1])
    where.mkdir(parents=True)
    for ended in run_in_both(shlex.join(sys.argv[3:]), where, timeout_s=float(sys.argv[2])):
        print(ended.explain())
