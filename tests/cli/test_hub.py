"""`model.pretrained=owner/name`, from a hub on this machine."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.cli.command import Answer, whale_train_process

NAME, COMMIT = "somebody/small-llama", "0123456789abcdef0123456789abcdef01234567"
LLAMA = {
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
RUN = (
    *("model=hf", "model.architecture=LlamaForCausalLM", "experiment=smoke", "train.steps=2"),
    *("data.sequence_length=16", "train.evaluate_every=null"),
)


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class Hub:
    """Serves a folder as one model of the hub; `asked` are the paths that were wanted of it."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                asked.append(self.path)
                files = {
                    path.relative_to(folder).as_posix(): path.read_bytes()
                    for path in folder.rglob("*")
                    if path.is_file()
                }
                wanted = self.path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
                status, body, more = 200, b"", {"Content-Type": "application/json"}
                if self.path == f"/api/models/{NAME}/revision/main":
                    body = json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode()
                elif self.path.startswith(f"/api/models/{NAME}/tree/{COMMIT}"):
                    listed = [
                        {"type": "file", "path": path, "size": len(content), "oid": sha1(content)}
                        for path, content in files.items()
                    ]
                    body = json.dumps(listed).encode()
                elif wanted in files:
                    body = files[wanted]
                    more = {"ETag": f'"{sha1(body)}"', "X-Repo-Commit": COMMIT}
                else:
                    status, more = 404, {"X-Error-Code": "RepoNotFound"}
                self.send_response(status)
                for key, value in {**more, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a small Llama beside which there are code, pickles and another format."""
    folder = tmp_path / "of_hub"
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    (folder / "original").mkdir()
    for name in ("modeling.py", "pytorch_model.bin", "original/consolidated.safetensors"):
        (folder / name).write_bytes(b"of no use")
    made = Hub(folder)
    monkeypatch.setenv("HF_ENDPOINT", made.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    yield made
    made.server.shutdown()
    made.server.server_close()


def train(folder: Path, name: str, pretrained: object, *more: str) -> Answer:
    wanted = (*RUN, f"model.pretrained={pretrained}", f"hydra.run.dir={name}")
    return whale_train_process([*wanted, *more], folder)  # which reads where the hub is


@pytest.mark.full
def test_a_name_is_fetched_and_trained(hub: Hub, tmp_path: Path) -> None:
    answer = train(tmp_path, "plan", NAME, "mode=plan")
    assert answer.status == 0, answer
    assert f"/{NAME}/resolve/{COMMIT}/config.json" in hub.asked
    assert not any(path.endswith(".safetensors") for path in hub.asked)  # to plan takes none
    answer = train(tmp_path, "named", NAME, "strategy=split")
    assert answer.status == 0, answer
    files = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}
    begun, trained = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "of_hub", tmp_path / "named" / "model")
    )
    assert begun.keys() == trained.keys()
    assert max(float((begun[name] - trained[name]).abs().max()) for name in begun) < 0.01
    hub.server.shutdown()  # what is there is enough
    hub.server.server_close()
    answer = train(tmp_path, "again", NAME, "mode=plan", "strategy=dp")
    assert answer.status == 0, answer


def test_what_the_hub_does_not_have_is_refused(hub: Hub, tmp_path: Path) -> None:
    answer = train(tmp_path, "refused", "somebody/else")
    assert answer.status == 2, answer
    said = "model.pretrained=somebody/else is no folder here, and cannot be had from the Hugging "
    assert f"{said}Face hub (Re" in " ".join(answer.stderr.split())
    assert not (tmp_path / "refused").exists()
