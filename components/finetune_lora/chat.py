"""Chats rendered by the tokenizer's own template, cut into what is given and what the assistant says.

Templates seldom mark the assistant's turns themselves, so the cuts are found by rendering: the chat up to a turn, with
the prompt for an answer, must be the beginning of the whole. A template for which that does not hold (one that
rewrites earlier turns) is refused, because its labels would be wrong. Left out on purpose: tools and images.
"""

from functools import cached_property
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from crosstrain.components.core.tokenizer import Tokenizer


class ChatTemplate:
    """The chat template of a tokenizer folder; read when the first chat comes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _template(self) -> PreTrainedTokenizerBase:
        loaded = AutoTokenizer.from_pretrained(self._tokenizer.folder, local_files_only=True)
        if not loaded.chat_template:
            raise ValueError(
                f"{self._tokenizer.folder}: the model's tokenizer has no chat template, and the data are chats; save "
                "one with it, or give rows of prompt and completion"
            )
        return loaded

    @cached_property
    def _control(self) -> list[str]:
        added = self._tokenizer.reference.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def spans(self, messages: Any, where: str) -> list[tuple[str, bool]]:
        """A chat's text in order, each piece with whether the assistant says it (to its end-of-turn token).

        Raises:
            ValueError: `messages` is no list of role and content, a content holds the text of a control token, or
                the template does not render it; `where` begins the message.
        """
        self._check(messages, where)
        whole = self._render(messages, where, answer=False)
        spans: list[tuple[str, bool]] = []
        done = 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            begin = self._length(messages[:number], whole, where, answer=True)
            end = self._length(messages[: number + 1], whole, where, answer=False)
            spans += [(whole[done:begin], False), (whole[begin:end], True)]
            done = end
        return [*spans, (whole[done:], False)]

    def _check(self, messages: Any, where: str) -> None:
        is_chat = isinstance(messages, list) and messages
        if not is_chat or not all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in messages
        ):
            raise ValueError(f"{where}: messages must be a list of objects with the texts role and content")
        if messages[0]["role"] == "assistant":
            raise ValueError(f"{where}: the chat begins with the assistant; put what it answers before it")
        for message in messages:
            for token in self._control:
                if token in message["content"]:
                    raise ValueError(
                        f"{where}: a message holds {token!r}, which would be read as the control token; take it out"
                    )

    def _length(self, messages: list[dict[str, str]], whole: str, where: str, answer: bool) -> int:
        part = self._render(messages, where, answer)
        if not whole.startswith(part):
            raise ValueError(
                f"{where}: the chat template renders the first {len(messages)} messages differently alone and within "
                "the whole chat, so what the assistant says cannot be marked; split it into rows with one answer each"
            )
        return len(part)

    def _render(self, messages: list[dict[str, str]], where: str, answer: bool) -> str:
        try:
            text = self._template.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
        except jinja2.TemplateError as error:
            raise ValueError(f"{where}: the chat template refuses this chat ({error})") from None
        return str(text)
