"""Write the files that pages of the documentation name, by the groups that a page asks for."""

import json
import tarfile
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MODELS = """from torch import nn


class Net(nn.Sequential):
    def __init__(self, width=8):
        super().__init__(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, features):
        return super().forward(features)
"""
_DATA = """import numpy as np


class Crop:
    def __init__(self, size):
        self.size = size

    def __call__(self, picture):
        return picture[:, : self.size, : self.size]


class Photos:
    def __init__(self, folder, transform):
        self.transform = transform

    def __len__(self):
        return 100

    def __getitem__(self, number):
        picture = np.zeros((3, 80, 80), np.float32)
        return self.transform(picture), number % 4
"""
_OPTIMIZERS = """import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {'lr': lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for x in group['params']:
                x.sub_(x.grad.sign(), alpha=group['lr'])
"""
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def write_files(folder: Path, groups: tuple[str, ...]) -> None:
    """Write the files of the groups. Raises ValueError for a group that there is not."""
    for group in groups:
        if group not in GROUPS:
            raise ValueError(f"'files: {group}' is none of {', '.join(GROUPS)}")
        GROUPS[group](folder)


def _write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def _text(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: _write(folder, name, text)


def _write_corpus(folder: Path) -> None:
    """Write texts, a row each: to train on, and to evaluate."""
    for name in ("corpus/a", "train/a", "code/a", "web/a", "valid", "test"):
        _write(folder, f"{name}.jsonl", '{"text": "the cat sat on the mat"}\n' * 200)


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of a few words, with a template of chats."""
    import tokenizers

    words_of_text = ("the", "cat", "sat", "on", "mat")
    names = ("<unk>", "<end>", "<mask>", "<pad>", "user", "assistant", *words_of_text)
    vocabulary = {name: number for number, name in enumerate(names)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    _write(folder, "my_tokenizer/tokenizer.json", words.to_str())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "<end>",
        "mask_token": "<mask>",
        "pad_token": "<pad>",
        "chat_template": _CHAT_TEMPLATE,
    }
    _write(folder, "my_tokenizer/tokenizer_config.json", json.dumps(config))


def _write_chats(folder: Path) -> None:
    """Write chats, and questions with answers, a row each."""
    asked, answered = "on the mat", "the cat sat on the mat"
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    _write(folder, "chats.jsonl", f"{json.dumps({'messages': messages})}\n" * 200)
    pair = {"question": asked, "answer": answered}
    _write(folder, "questions.jsonl", f"{json.dumps(pair)}\n" * 200)


def _write_arrays(folder: Path) -> None:
    """Write samples of six features with one of four labels: 256 to train on, 64 to evaluate, and
    20 without labels."""
    import numpy as np

    rng = np.random.default_rng(0)
    for name, num_samples in (("samples", 256), ("valid", 64), ("test", 64)):
        features = rng.normal(size=(num_samples, 6)).astype("float32")
        labels = rng.integers(0, 4, num_samples)
        np.savez(folder / f"{name}.npz", features=features, labels=labels)
    np.savez(folder / "new.npz", features=rng.normal(size=(20, 6)).astype("float32"))


def _write_rows(folder: Path) -> None:
    """Write rows of six numbers and a class: whole ones, and some of which one has no class."""
    rows = [json.dumps({"values": [n / 200] * 6, "class": n % 4}) for n in range(200)]
    _write(folder, "rows/a.jsonl", "\n".join(rows))
    _write(
        folder, "rows_with_a_gap/a.jsonl", "\n".join([*rows[:3], rows[3].replace("3}", "null}")])
    )


def _write_images(folder: Path) -> None:
    """Write images of two classes into folders."""
    from PIL import Image

    for part, name in product(("train", "val"), ("cat", "dog")):
        (folder / "imagenet" / part / name).mkdir(parents=True)
        for number in range(2):
            image = Image.new("RGB", (32, 24), (number, 20, 30))
            image.save(folder / "imagenet" / part / name / f"{number}.png")


def _write_shards(folder: Path) -> None:
    """Write a tar file of two images with their classes and captions."""
    from PIL import Image

    (folder / "shards").mkdir()
    (folder / "shards/label").write_text("1")
    (folder / "shards/caption").write_text("the cat sat on the mat")
    with tarfile.open(folder / "shards/train-000.tar", "w") as tar:
        for number in range(2):
            image = folder / f"shards/{number}.png"
            Image.new("RGB", (32, 24), (number, 20, 30)).save(image)
            tar.add(image, f"{number}.png")
            tar.add(folder / "shards/label", f"{number}.cls")
            tar.add(folder / "shards/caption", f"{number}.txt")
            image.unlink()
    (folder / "shards/label").unlink()
    (folder / "shards/caption").unlink()


def _write_llama(folder: Path) -> None:
    """Write the weights of a small Llama, as `save_pretrained` does, into `DIR`."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, vocab_size=257)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "DIR")


def _write_inventory(folder: Path) -> None:
    """Write an inventory of one's own into the folder of configs `conf`."""
    text = (ROOT / "conf/hardware/v100_p100_mix.yaml").read_text()
    _write(folder, "conf/hardware/my_cluster.yaml", text)


GROUPS: Mapping[str, Callable[[Path], None]] = {
    "corpus": _write_corpus,
    "tokenizer": _write_tokenizer,
    "chats": _write_chats,
    "arrays": _write_arrays,
    "rows": _write_rows,
    "images": _write_images,
    "shards": _write_shards,
    "llama": _write_llama,
    "inventory": _write_inventory,
    "models": _text("my_models.py", _MODELS),
    "data": _text("my_data.py", _DATA),
    "optimizers": _text("my_optimizers.py", _OPTIMIZERS),
}
