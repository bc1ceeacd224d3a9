"""Test checkpoints in S3: one run copies them, and others continue from them, predict and export.

python benchmarks/s3_api.py

The server is moto, on this machine. moto and s3fs conflict with the versions in constraints.txt
(botocore needs python-dateutil below 3, and cfn-lint another antlr4). So pip installs each into a
folder of its own, which only the processes that need it use.
"""

import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

PORT = 5571
TO = "s3://bucket/runs/mine"
RUN = (
    *("experiment=smoke", "checkpoint.every=2", "checkpoint.keep=1", f"checkpoint.to={TO}"),
    "train.evaluate_every=null",
)
READ = (f"path={TO}", "hardware=cpu", "train.evaluation_samples=40")
# The overrides of each command, its exit status, and a part of its output.
COMMANDS: tuple[tuple[tuple[str, ...], int, str], ...] = (
    ((*RUN, "train.steps=4", "strategy=split", "hydra.run.dir=a"), 0, f"copied: {TO}/model ("),
    (
        (*RUN, "train.steps=6", "strategy=zero1", "train.resume=auto", "hydra.run.dir=b"),
        *(0, f"going on after step 4, from {TO}/step_4"),
    ),
    (("mode=predict", *READ, "hydra.run.dir=c"), 0, "40 predictions of evaluation"),
    (("mode=export", f"path={TO}", "hydra.run.dir=d"), 0, "exporting step 6"),
    ((*RUN, "train.steps=4", "hydra.run.dir=e"), 2, "holds the checkpoints of another run"),
    (
        ("experiment=smoke", "checkpoint.to=s3://none/x", "hydra.run.dir=f"),
        *(2, "The specified bucket does not exist"),
    ),
)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="whale-s3-") as name:
        folder = Path(name)
        server = installed(folder / "server", "moto[server]")
        client = installed(folder / "client", f"s3fs=={version('fsspec')}")
        environment = os.environ | {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{PORT}",
            **{"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"},
            **{"AWS_DEFAULT_REGION": "us-east-1", "PYTHONPATH": str(client)},
        }
        started = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(PORT)]
        process = subprocess.Popen(
            started,
            env=environment | {"PYTHONPATH": str(server)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            make_bucket(environment)
            for arguments, status, expected in COMMANDS:
                carry_out(arguments, status, expected, folder, environment)
        finally:
            process.terminate()
            process.wait()


def installed(folder: Path, package: str) -> Path:
    """Install a package into `folder`, and return the folder."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--prefer-binary"]
    subprocess.run([*command, "--target", str(folder), package], check=True)
    return folder


def make_bucket(environment: dict[str, str]) -> None:
    """Wait for the server, and make the bucket. Exits the process where the server does not
    answer."""
    program = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
    for _ in range(30):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, stderr=subprocess.DEVNULL
        )
        if done.returncode == 0:
            return
        time.sleep(0.5)
    sys.exit("the server does not answer")


def carry_out(
    arguments: tuple[str, ...],
    status: int,
    expected: str,
    folder: Path,
    environment: dict[str, str],
) -> None:
    """Run a command, and print the lines of its output on the store.

    arguments: the overrides.
    status: the expected exit status.
    expected: a text that the output must have.
    folder: the working directory.
    environment: the environment of the command.

    Exits the process where the status or the output is not as expected.
    """
    command = [sys.executable, "-m", "whale_train.launcher.cli", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, check=False
    )
    said = done.stdout + done.stderr
    print("whale-train", *arguments)
    for line in said.splitlines():
        if line.startswith(("copied", "copying", "going on", "exporting", "error")):
            print(f"    {line}")
    if done.returncode != status or expected not in said:
        sys.exit(f"exit status {done.returncode} instead of {status}:\n{said}")


if __name__ == "__main__":
    main()
