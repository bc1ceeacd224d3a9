"""Load a tokenizer from its folder, and turn texts into token numbers.

A folder without a tokenizer is refused. transformers 5.23 makes an empty tokenizer of it, which
turns every text into nothing (`findings/transformers_makes_an_empty_tokenizer.sh`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whale_train.data.tokens.token_store import Special
from whale_train.data.tokens.tokenizer_files import tokenizer_files
from whale_train.errors import ConfigError, Fault
from whale_train.extras import how_to_install
from whale_train.own_code import said

KEY = "data.tokenizer"


class Tokenizer:
    """A tokenizer of transformers.

    special: the special tokens.
    vocabulary: the largest token number plus one; some numbers may be no token's.
    """

    def __init__(self, folder: str) -> None:
        """Load the tokenizer in `folder`. Raises ConfigError where the folder has none, or
        transformers is not installed."""
        if not tokenizer_files(Path(folder)):
            rule = "is a folder without a tokenizer (no tokenizer.json, vocabulary or model of one)"
            raise _refusal(folder, rule)
        try:
            from transformers import AutoTokenizer
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            rule = "needs transformers, which is not installed"
            remedy = how_to_install("transformers")
            raise ConfigError([Fault(KEY, folder, rule, remedy)]) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise _refusal(folder, f"is no tokenizer ({said(error)[:300]})") from error
        numbers = self._tokenizer.get_vocab().values()
        self.vocabulary = max(len(self._tokenizer), max(numbers, default=-1) + 1)
        ids = tuple(self._tokenizer.all_special_ids)
        if len(self._tokenizer) <= len(ids):
            raise _refusal(folder, "is a tokenizer without a vocabulary")
        own = self._tokenizer
        around: list[int] = own("", verbose=False)["input_ids"]
        begins = (own.bos_token_id, own.cls_token_id)
        count = next((i for i, x in enumerate(around) if x not in begins), len(around))
        self._before, self._after = around[:count], around[count:]
        if not self._after and own.eos_token_id is not None:
            self._after = [own.eos_token_id]
        self.special = Special(own.eos_token_id, own.pad_token_id, own.mask_token_id, ids)
        self._fast: Any = getattr(own, "backend_tokenizer", None) if own.is_fast else None
        if self._fast is not None:
            # A tokenizer.json may truncate or pad, which only transformers' own calls undo
            # (findings/transformers_calls_undo_truncation_of_the_file.sh).
            self._fast.no_truncation()
            self._fast.no_padding()

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of texts, without special tokens around them."""
        if self._fast is not None:  # without the offsets and masks that transformers adds
            return [x.ids for x in self._fast.encode_batch_fast(texts, add_special_tokens=False)]
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        numbers: list[list[int]] = encoded["input_ids"]
        return numbers

    def document(self, numbers: list[int], begins: bool = True, ends: bool = True) -> list[int]:
        """Return the token numbers of a document with the special tokens around it, and an
        end-of-text token, where the tokenizer has one.

        numbers: token numbers of the document, or of a part of it.
        begins, ends: whether the document begins and ends with `numbers`.
        """
        return [*self._before * begins, *numbers, *self._after * ends]

    def chat(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """Return the token numbers of a chat in the tokenizer's template, and a mask of the tokens
        of answers (of the role `assistant`).

        Raises ValueError with the reason where the template cannot be used.
        """
        text, spans = self._rendered(messages)
        own = self._tokenizer
        encoded = own(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        numbers: list[int] = encoded["input_ids"]
        counts = [any(a <= start < b for a, b in spans) for start, _ in encoded["offset_mapping"]]
        return numbers, counts

    def _rendered(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a chat, and the spans (start, stop) of the answers in characters.

        An answer is the difference between the chat up to and including it, and the chat before it
        with the template's generation prompt.
        """
        own = self._tokenizer
        if not own.chat_template:
            raise ValueError("the tokenizer has no chat template")
        if self._fast is None:
            raise ValueError("the tokenizer is a slow one, which does not say where tokens are")

        def text_of(count: int, begins_answer: bool) -> str:
            rendered: str = own.apply_chat_template(
                messages[:count], tokenize=False, add_generation_prompt=begins_answer
            )
            return rendered

        full_text = text_of(len(messages), False)
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before, after = text_of(number, True), text_of(number + 1, False)
            if not after.startswith(before) or not full_text.startswith(after):
                raise ValueError("its template writes a chat otherwise once it goes on")
            spans.append((len(before), len(after)))
        return full_text, spans


def _refusal(folder: str, rule: str) -> ConfigError:
    remedy = "name a folder that a tokenizer's save_pretrained() wrote, or owner/name of the hub"
    return ConfigError([Fault(KEY, folder, rule, remedy)])
