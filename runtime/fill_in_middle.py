"""Text before and after a gap → the prompt for the text in it, with the control tokens that a model has for that."""

import dataclasses
from collections.abc import Container, Sequence

from ingot.errors import RequestError
from ingot.runtime.template_text import TemplateText, as_content, by_template, concatenate


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FillTokens:
    """suffix_first: the text after the gap stands first. middle: "" where the model has no such token."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False


_FORMS: Sequence[FillTokens] = (
    FillTokens(prefix="<|fim_prefix|>", suffix="<|fim_suffix|>", middle="<|fim_middle|>"),
    FillTokens(prefix="<fim_prefix>", suffix="<fim_suffix>", middle="<fim_middle>"),
    FillTokens(prefix="<fim-prefix>", suffix="<fim-suffix>", middle="<fim-middle>"),
    FillTokens(prefix="<｜fim▁begin｜>", suffix="<｜fim▁hole｜>", middle="<｜fim▁end｜>"),
    FillTokens(prefix="<[fim-prefix]>", suffix="<[fim-suffix]>", middle="<[fim-middle]>", suffix_first=True),
    FillTokens(prefix="[PREFIX]", suffix="[SUFFIX]", middle="", suffix_first=True),
)


def fill_prompt(before: str, after: str, tokens: Container[str]) -> TemplateText:
    """tokens: the control tokens of the tokenizer. Those in either text are text. Raises RequestError."""
    for form in _FORMS:
        if all(each in tokens for each in (form.prefix, form.suffix, form.middle) if each):
            parts = [by_template(form.prefix), as_content(before), by_template(form.suffix), as_content(after)]
            if form.suffix_first:
                parts = [*parts[2:], *parts[:2]]
            return concatenate([*parts, by_template(form.middle)])
    raise RequestError(
        "suffix is not supported: the model has no tokens for filling in the middle",
        expected="one of " + ", ".join(f"{form.prefix} ... {form.suffix}" for form in _FORMS),
        hint="leave suffix out",
    )
