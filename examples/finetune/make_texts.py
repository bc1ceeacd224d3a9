"""Write texts to pretrain on, chats to fine-tune on, and a tokenizer of their words."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

ANIMALS = ["cat", "dog", "horse", "mouse", "hen", "goat", "duck", "frog"]
PLACES = ["mat", "roof", "grass", "table", "bridge", "hill", "road", "boat"]
SPECIAL = ["<unk>", "<end>", "<pad>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <end> "
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
rng = np.random.default_rng(0)


def story():
    """Return a story of three animals, and their places by name."""
    animals, places = (rng.choice(x, 3, replace=False).tolist() for x in (ANIMALS, PLACES))
    where = dict(zip(animals, places, strict=True))
    return " ".join(f"the {animal} is on the {where[animal]} ." for animal in animals), where


def told_twice():
    told, _ = story()
    return {"text": f"{told} {told}"}


def chat():
    told, where = story()
    asked = rng.choice(list(where))
    question = {"role": "user", "content": f"{told} where is the {asked} ?"}
    return {"messages": [question, {"role": "assistant", "content": f"on the {where[asked]} ."}]}


for name, make, count in (("texts", told_twice, 4000), ("chats", chat, 1000), ("new", chat, 200)):
    Path(f"{name}.jsonl").write_text("".join(json.dumps(make()) + "\n" for _ in range(count)))
names = [*SPECIAL, *["the", "is", "on", "where", ".", "?"], *ANIMALS, *PLACES]
words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
words.add_special_tokens(SPECIAL)
Path("words").mkdir(exist_ok=True)
words.save("words/tokenizer.json")
named = {"unk_token": "<unk>", "eos_token": "<end>", "pad_token": "<pad>"}
named |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
Path("words/tokenizer_config.json").write_text(json.dumps(named))
