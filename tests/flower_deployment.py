"""A real deployment on this machine: a SuperLink and SuperNodes as processes, with TLS and node keys.

Everything is on 127.0.0.1 and in one folder: certificates, keys, Flower's home, logs. Every wait has an
end, and every process that was started is stopped by its own id, whatever happened in between.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fmol.flower import SWITCHED_OFF

HOST = "127.0.0.1"
CONNECTION = "loopback"
"""The name under which `flwr` knows the SuperLink."""
COMMANDS = Path(sys.executable).parent
"""Where Flower's commands lie."""
STOP_SECONDS = 10.0


class DeploymentError(AssertionError):
    """Something that was waited for did not come. The message has the last lines of the log."""


# ---- certificates and keys -------------------------------------------------------------------


def make_certificates(folder: Path) -> None:
    """Writes `ca.crt`, `server.pem` and `server.key`: an authority, and a SuperLink on this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fmol test authority")])
    certificate = _certificate(issuer, issuer, authority, authority, authority=True)
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    certificate = _certificate(subject, issuer, key, authority)
    (folder / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_private(folder / "server.key", _private_bytes(key, serialization.PrivateFormat.PKCS8))


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    authority: bool = False,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                key_cert_sign=authority,
                crl_sign=authority,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    )
    if not authority:
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))]
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(usage, critical=False)
    return builder.sign(signer, hashes.SHA384())


def make_node_key(path: Path) -> Path:
    """Writes a node's key pair as `ssh-keygen` does, `path` and `path.pub`; returns the public one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(path, _private_bytes(key, serialization.PrivateFormat.OpenSSH))
    public = path.with_name(path.name + ".pub")
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )
    return public


def _private_bytes(key: ec.EllipticCurvePrivateKey, format: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, format, serialization.NoEncryption())


def _write_private(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)


# ---- processes -------------------------------------------------------------------------------


MARK = "FMOL_STARTED_BY"
"""In the environment of every process that is started here, and so of all that those start."""


@dataclass
class Program:
    """One process that was started here, its mark and its log."""

    name: str
    mark: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.text().splitlines()[-lines:])

    def kill(self) -> None:
        """Ends it at once, as a power cut would, with everything that it has started."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Asks it to end, and ends it if it does not, with everything that it has started."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self.alive:
            self.process.send_signal(how)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_SECONDS)
        # Those that it started end with it, in a moment or by force.
        wait_until(lambda: not marked(self.mark), seconds=3.0)
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def marked(mark: str, command: str = "") -> list[int]:
    """The ids of processes that carry a mark, of those alone whose command has `command` in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "environ").read_bytes().split(b"\0")
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # It has ended, or is not ours to look at.
            continue
        carried = [word for word in words if word.startswith(f"{MARK}={mark}".encode())]
        if (
            carried and line and command in line
        ):  # What has ended and was not waited for has no line.
            found.append(int(entry.name))
    return found


LISTENING = "0A"
"""The kernel's word for a socket that waits for others, and has no other end yet."""


def addresses(pid: int) -> set[str]:
    """The IP addresses at either end of a process's TCP sockets."""
    found: set[str] = set()
    try:
        links = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
        inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in inodes:
                    ends = fields[1:2] if fields[3] == LISTENING else fields[1:3]
                    found |= {_address(end) for end in ends}
    except OSError:  # It has ended while we looked.
        pass
    return found


def _address(end: str) -> str:
    """The address in the kernel's notation: words of four bytes, each in the machine's order."""
    text = end.partition(":")[0]
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def wait_until(ready: Callable[[], Any], *, seconds: float, every: float = 0.05) -> Any:
    """What `ready` returns once that is true, or the last of it when the time is up."""
    until = time.monotonic() + seconds
    while not (found := ready()) and time.monotonic() < until:
        time.sleep(every)
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


# ---- the deployment --------------------------------------------------------------------------


@dataclass
class Run:
    """One run of an app: its id, and the server's log as it comes."""

    id: int
    program: Program

    def text(self) -> str:
        return self.program.text()

    def wait_for(self, pattern: str, *, seconds: float) -> re.Match[str]:
        """The first place in the server's log that matches; raises where none comes in time."""
        found: re.Match[str] | None = wait_until(
            lambda: re.search(pattern, self.text()), seconds=seconds, every=0.1
        )
        if found is None:
            raise DeploymentError(
                f"`{pattern}` was not in the server's log within {seconds:g} s:\n"
                f"{self.program.tail()}"
            )
        return found


@dataclass
class Deployment:
    """A SuperLink and its SuperNodes on this machine. Use it by `with deployment(folder) as …`."""

    folder: Path
    secure: bool = True
    env: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, Program] = field(default_factory=dict)
    superlink: Program | None = None
    port: int = 0
    _programs: list[Program] = field(default_factory=list)
    _mark: str = field(default_factory=lambda: uuid4().hex)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sockets = Path(tempfile.mkdtemp(prefix="fmol-"))  # Their paths must be short.
        self.env = {
            **os.environ,
            **SWITCHED_OFF,
            "PATH": f"{COMMANDS}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.folder / "home"),
            "PYTHONPATH": str(Path(__file__).parent),
            "XDG_RUNTIME_DIR": str(self.sockets),
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "COLUMNS": "200",
            **self.env,
        }
        if self.secure:
            make_certificates(self.folder)

    # ---- parts ----

    def start_superlink(self, *, seconds: float = 180.0) -> Program:
        """The SuperLink once it answers; started again, it has its port, nodes and runs still."""
        self.port = self.port or free_port()
        command = ["flower-superlink", "--host", HOST, "--port", str(self.port)]
        command += ["--database", "superlink.db"]
        if self.secure:
            command += ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem"]
            command += ["--ssl-keyfile", "server.key", "--enable-supernode-auth"]
        else:
            command += ["--insecure"]
        self.superlink = self._start("superlink", command)
        self._connect()
        self._wait_for_port(self.superlink, self.port, seconds)
        return self.superlink

    def start_node(
        self, name: str, config: Mapping[str, Any], env: Mapping[str, str] | None = None
    ) -> Program:
        """A SuperNode. Its key is made when it is first started, and must be registered by then."""
        command = ["flower-supernode", "--superlink", f"{HOST}:{self.port}"]
        command += ["--port", str(free_port()), "--node-config", to_toml_words(config)]
        if self.secure:
            if not (self.folder / name).exists():
                make_node_key(self.folder / name)
            command += ["--root-certificates", "ca.crt", "--auth-supernode-private-key", name]
        else:
            command += ["--insecure"]
        self.nodes[name] = self._start(name, command, env)
        return self.nodes[name]

    def bring_back(self, name: str, config: Mapping[str, Any], *, seconds: float = 120.0) -> None:
        """Starts a node again as a supervisor does, until it stays.

        One that was killed is not let in before Flower has noticed that it is gone, which takes a
        minute: until then a new one ends with a message.
        """

        def stays() -> bool:
            node = self.nodes[name]
            if "SuperNode ID" in node.text():
                return True
            if not node.alive:
                node.stop()  # What it has started, too.
                time.sleep(2.0)
                self.start_node(name, config)
            return False

        self.start_node(name, config)
        if not wait_until(stays, seconds=seconds, every=0.2):
            raise DeploymentError(f"{name} was not let in again:\n{self.nodes[name].tail()}")

    def register(self, *names: str) -> None:
        """Makes a key for each node and registers it at the SuperLink."""
        started = [
            self._start(
                f"register-{name}",
                [
                    "flwr",
                    "supernode",
                    "register",
                    str(make_node_key(self.folder / name)),
                    CONNECTION,
                ],
            )
            for name in names
        ]
        for each in started:
            self._finished(each, 180.0)

    def start_nodes(self, configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Registers and starts a SuperNode for each name."""
        if self.secure:
            self.register(*configs)
        for name, config in configs.items():
            self.start_node(name, config)

    # ---- runs ----

    def run(self, app: Path, config: Mapping[str, Any] | None = None) -> Run:
        """Submits an app as `flwr run` does, and follows the server's log."""
        command = ["flwr", "run", str(app), CONNECTION, "--stream"]
        if config:
            command += ["--run-config", to_toml_words(config)]
        program = self._start("run", command)
        found = wait_until(
            lambda: re.search(r"started run (\d+)", program.text()) or not program.alive,
            seconds=180.0,
        )
        if not isinstance(found, re.Match):
            raise DeploymentError(f"the run was not started:\n{program.tail()}")
        return Run(int(found[1]), program)

    def status(self, run: Run) -> str:
        """What became of a run, `finished:completed`, `finished:failed` or `running`.

        The exit status of `flwr run` does not tell: it is 0 for failed runs too.
        """
        listed = self.flwr("list", CONNECTION, "--run-id", str(run.id), "--format", "json")
        found: str = json.loads(listed[listed.index("{") :])["runs"][0]["status"]
        return found

    def wait(self, run: Run, *, seconds: float) -> str:
        """The status of a run once it has ended; raises where it has not in time."""
        if not wait_until(lambda: not run.program.alive, seconds=seconds, every=0.1):
            raise DeploymentError(
                f"run {run.id} had not ended after {seconds:g} s:\n{run.program.tail()}"
            )
        return self.status(run)

    def flwr(self, *arguments: str, seconds: float = 180.0) -> str:
        """What a `flwr` command prints; raises where it fails."""
        program = self._start(f"flwr-{arguments[0]}", ["flwr", *arguments])
        self._finished(program, seconds)
        return program.text()

    # ---- inside ----

    def _connect(self) -> None:
        """Tells `flwr` where the SuperLink is; without a default, nothing goes elsewhere by mistake."""
        home = Path(self.env["FLWR_HOME"])
        home.mkdir(parents=True, exist_ok=True)
        lines = [f"[superlink.{CONNECTION}]", f'address = "{HOST}:{self.port}"']
        lines += (
            [f'root-certificates = "{self.folder / "ca.crt"}"']
            if self.secure
            else ["insecure = true"]
        )
        (home / "config.toml").write_text("\n".join(lines) + "\n")

    def _start(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> Program:
        number = sum(each.name == name for each in self._programs)
        log = self.folder / f"{name}.{number}.log"
        program = shutil.which(command[0], path=self.env["PATH"])
        if program is None:
            raise DeploymentError(f"`{command[0]}` is not installed beside {sys.executable}.")
        command = [program, *command[1:]]
        if ends := shutil.which("setpriv"):
            # Whoever ends the tests with a signal that cannot be caught ends these too.
            command = [ends, "--pdeathsig", "TERM", *command]
        mark = f"{self._mark}.{len(self._programs)}."
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.env, **(env or {}), MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # An interrupt from the keyboard is ours to pass on.
            )
        self._programs.append(Program(name, mark, process, log))
        return self._programs[-1]

    def _finished(self, program: Program, seconds: float) -> None:
        try:
            status = program.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise DeploymentError(
                f"{program.name} took over {seconds:g} s:\n{program.tail()}"
            ) from None
        if status != 0:
            raise DeploymentError(f"{program.name} ended with {status}:\n{program.tail()}")

    def _wait_for_port(self, program: Program, port: int, seconds: float) -> None:
        def answers() -> bool:
            with socket.socket() as attempt:
                attempt.settimeout(1.0)
                return attempt.connect_ex((HOST, port)) == 0

        wait_until(lambda: answers() or not program.alive, seconds=seconds)
        if not program.alive or not answers():
            raise DeploymentError(f"{program.name} does not answer:\n{program.tail()}")

    def peers(self) -> set[str]:
        """The addresses to which any process of this deployment has a connection, or listens."""
        return {address for pid in self.running() for address in addresses(pid)}

    def running(self, command: str = "") -> list[int]:
        """The ids of all processes that run because of this deployment."""
        return marked(self._mark, command)

    def stop(self) -> None:
        """Stops everything that was started, the nodes first and the SuperLink last."""
        others = [each for each in self._programs if each is not self.superlink]
        for program in others:
            if program.alive:
                program.process.terminate()  # All at once, so that none waits for another's turn.
        for program in [*others, *([self.superlink] if self.superlink else [])]:
            program.stop()
        shutil.rmtree(self.sockets, ignore_errors=True)


APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "An app of the tests"
license = "Apache-2.0"
dependencies = ["fmol[flower]"]

[tool.flwr.app]
publisher = "fmol"

[tool.flwr.app.components]
serverapp = "{name}.server_app:app"
clientapp = "{name}.client_app:app"

[tool.flwr.app.config]
{config}
"""


def write_app(
    folder: Path, *, server: str, client: str, config: Mapping[str, Any], name: str = "deployed"
) -> Path:
    """A Flower app in `folder` whose two modules have these texts."""
    package = folder / name
    package.mkdir(parents=True)
    lines = [f"{key} = {json.dumps(value)}" for key, value in config.items()]
    (folder / "pyproject.toml").write_text(APP.format(name=name, config="\n".join(lines)))
    (package / "__init__.py").write_text("")
    (package / "server_app.py").write_text(server)
    (package / "client_app.py").write_text(client)
    return folder


CONFIG = {
    "num-server-rounds": 3,
    "out": "",
    "min-sites": 3,
    "patience": 180.0,
    "timeout": 180.0,
    "on-missing-objective": "skip",
}
"""What a run of the tests' app can be told, and what it does otherwise."""


def write_test_app(folder: Path, *, warm: bool = True) -> Path:
    """The app of `deployed_server` and `deployed_sites`, which nodes find beside this module."""
    client = (
        'from fmol.flower.warm import keep_warm\n\napp = keep_warm("deployed_sites:app")\n'
        if warm
        else "import deployed_sites\n\napp = deployed_sites.app\n"
    )
    server = "import deployed_server\n\napp = deployed_server.app\n"
    return write_app(folder, server=server, client=client, config=CONFIG)


def to_toml_words(config: Mapping[str, Any]) -> str:
    """`key=value` pairs as Flower's options take them.

    >>> to_toml_words({"num-server-rounds": 3, "data": "/srv/a", "fast": True})
    'num-server-rounds=3 data="/srv/a" fast=true'
    """
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


@contextlib.contextmanager
def deployment(
    folder: Path, *, secure: bool = True, env: Mapping[str, str] | None = None
) -> Iterator[Deployment]:
    """A SuperLink that runs, to which nodes can be added; at the end nothing of it is left."""
    made = Deployment(folder, secure, dict(env or {}))
    try:
        made.start_superlink()
        yield made
    finally:
        made.stop()
