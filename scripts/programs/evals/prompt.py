"""Rows as token ids: before the question, from the question on, and in a second turn."""

import dataclasses
import functools
from collections.abc import Sequence

from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs.evals.task import Count, Row

_MARK = "\ue000"  # a character of no script


@dataclasses.dataclass(frozen=True)
class Prompt:
  """Token ids of a row.

  The two parts are encoded apart, so that a cache filled with `head` before the question is known
  and one filled with both at once have read the same tokens.

  Attributes:
    head: the context, and the chat markup before it.
    tail: the question, the markup after it, and the beginning of the answer.
    second: of a row with a second question: the markup that closes the first answer, the question,
      and what is after it, as in `tail`.
    other: the second question as it is asked where the first one never was, as in `tail`.
  """

  head: list[int]
  tail: list[int]
  second: list[int] = dataclasses.field(default_factory=list)
  other: list[int] = dataclasses.field(default_factory=list)

  @property
  def ids(self) -> list[int]:
    """The first turn: what is read at once."""
    return self.head + self.tail

  def second_after(self, answer: Sequence[int]) -> list[int]:
    """The second turn's tokens after an answer, which may end with the token that closes it."""
    closed = len(answer) > 0 and self.second[0] == answer[-1]
    return self.second[1:] if closed else self.second


class Reader:
  """Encodes rows for one tokenizer.

  Args:
    tokenizer: of the model.
    chat: put a row as a user's turn of a chat, where the tokenizer has a chat template; plain text
      otherwise.
  """

  def __init__(self, tokenizer: Tokenizer, *, chat: bool = True):
    self.tokenizer, self.chat = tokenizer, chat
    self._markup: tuple[str, str] | None = None
    if chat and tokenizer.chat_template is not None:
      # Rendered once: a template does with a long text what it does with one character.
      text = tokenizer.render([{"role": "user", "content": _MARK}])
      if text.count(_MARK) != 1:
        raise ValueError(
          f"chat_template: found a user's text {text.count(_MARK)} times in a chat, expected once"
        )
      before, behind = text.split(_MARK)
      self._markup = before, behind

  def encode(self, context: str, question: str, answer_prefix: str, *second: str) -> Prompt:
    """Token ids; in a chat the answer begins without its leading space.

    `second` is the question and the answer prefix of a second turn.

    Raises:
      ValueError: there is a second turn and no chat template, or one that does not render it.
    """
    if self._markup is None:
      if second:
        raise ValueError("chat_template: found none in use, expected one, to take a second turn")
      head = [*self.tokenizer.prefix, *self.tokenizer.encode(context, bos=False)]
      return Prompt(head, self._behind(question + answer_prefix))
    before, _ = self._markup
    head = self.tokenizer.encode(before + context, bos=False)
    tail = self._tail(question, answer_prefix)
    if not second:
      return Prompt(head, tail)
    return Prompt(head, tail, self._second(*second), self._tail(*second))

  def _tail(self, question: str, answer_prefix: str) -> list[int]:
    text = question + self._markup[1] + answer_prefix.lstrip()
    return self._behind(text)

  def _behind(self, text: str) -> list[int]:
    """Token ids of a text that others stand before."""
    return self.tokenizer.encode(text, after="a")

  def _second(self, question: str, answer_prefix: str) -> list[int]:
    between, behind = self._next_turn
    close = self.tokenizer.encode(between.lstrip(), bos=False)[:1]
    if close and self.tokenizer.is_special(close[0]):  # first, where `second_after` looks for it
      between = between.lstrip()
    return self._behind(between + question.lstrip() + behind + answer_prefix.lstrip())

  @functools.cached_property
  def _next_turn(self) -> tuple[str, str]:
    """Markup from the end of an answer to a user's next text, and after that."""
    roles = ("user", "assistant", "user")
    text = self.tokenizer.render([{"role": role, "content": _MARK} for role in roles])
    if text.count(_MARK) != 3:
      raise ValueError(
        f"chat_template: found {text.count(_MARK)} of a chat's three texts, expected each once"
      )
    _, _, between, behind = text.split(_MARK)
    return between, behind

  def row(self, row: Row) -> Prompt:
    """Token ids of a row."""
    second = () if row.second is None else (row.second.question, row.second.answer_prefix)
    return self.encode(row.context, row.question, row.answer_prefix, *second)

  def text(self, row: Row) -> Prompt:
    """Token ids of a text that is predicted from its first token on."""
    return Prompt([], self.tokenizer.encode(row.continuation, bos=False))

  def continuation(self, row: Row) -> list[int]:
    """Token ids of what follows the row in its source, as many as the row reserves.

    Raises:
      ValueError: there are fewer.
    """
    ids = self._behind(row.continuation)
    if len(ids) < row.max_new_tokens:
      raise ValueError(
        f"{row.task}: found {len(ids)} tokens to follow, expected {row.max_new_tokens}"
      )
    return ids[: row.max_new_tokens]

  @property
  def count(self) -> Count:
    """Counter of tokens for tasks."""

    def tokens(*texts: str) -> int:
      prompt = self.encode(*texts)
      return len(prompt.ids) + len(prompt.second)

    return tokens
