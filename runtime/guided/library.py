"""The C interface of llguidance, which its wheel exports beside the Python class: sessions call it natively.

Structures and functions are those of its header, llguidance.h. A handle belongs to who made it.
"""

import ctypes
import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

from ingot.errors import RequestError, install

_INSTALL = install("guided")
_MESSAGE_BYTES = 4096
_LOWEST, _BEYOND = (1, 9), (2, 0)  # LlgConstraintInit says no size of its own: other versions may have other fields

TOKENIZE = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint8),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_size_t,
)
"""(user data, bytes, their number, where tokens go, room for this many) → tokens in all. From any thread."""


class TokenizerInit(ctypes.Structure):
    """LlgTokenizerInitV2."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.c_void_p),
        ("token_bytes", ctypes.c_void_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", TOKENIZE),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
        ("tok_eos_extra", ctypes.c_void_p),
        ("tok_eos_extra_count", ctypes.c_uint32),
    )


class ParserLimits(ctypes.Structure):
    """LlgParserLimits."""

    _fields_ = (
        ("max_items_in_row", ctypes.c_size_t),
        ("initial_lexer_fuel", ctypes.c_uint64),
        ("step_lexer_fuel", ctypes.c_uint64),
        ("step_max_items", ctypes.c_size_t),
        ("max_lexer_states", ctypes.c_size_t),
        ("max_grammar_size", ctypes.c_size_t),
        ("precompute_large_lexemes", ctypes.c_bool),
        ("verbose_errors", ctypes.c_bool),
    )


class ConstraintInit(ctypes.Structure):
    """LlgConstraintInit."""

    _fields_ = (
        ("tokenizer", ctypes.c_void_p),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
        ("ff_tokens_ok", ctypes.c_bool),
        ("backtrack_ok", ctypes.c_bool),
        ("limits", ParserLimits),
        ("room", ctypes.c_uint8 * 256),  # for what a later version writes behind
    )


_P, _I, _TOKENS = ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint32)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llg_new_tokenizer_v2": (_P, (ctypes.POINTER(TokenizerInit), ctypes.c_char_p, ctypes.c_size_t)),
    "llg_free_tokenizer": (None, (_P,)),
    "llg_constraint_init_set_defaults": (None, (ctypes.POINTER(ConstraintInit), _P)),
    "llg_new_matcher": (_P, (ctypes.POINTER(ConstraintInit), ctypes.c_char_p, ctypes.c_char_p)),
    "llg_validate_grammar": (
        _I,
        (ctypes.POINTER(ConstraintInit), ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t),
    ),
    "llg_clone_matcher": (_P, (_P,)),
    "llg_free_matcher": (None, (_P,)),
    "llg_matcher_get_error": (ctypes.c_char_p, (_P,)),
    "llg_matcher_get_mask_byte_size": (ctypes.c_size_t, (_P,)),
    "llg_matcher_compute_mask_into": (_I, (_P, _P, ctypes.c_size_t)),
    "llg_matcher_consume_token": (_I, (_P, ctypes.c_uint32)),
    "llg_matcher_reset": (_I, (_P,)),
    "llg_matcher_rollback": (_I, (_P, ctypes.c_size_t)),
    "llg_matcher_validate_tokens": (_I, (_P, _TOKENS, ctypes.c_size_t)),
    "llg_matcher_compute_ff_tokens": (_I, (_P, _TOKENS, ctypes.c_size_t)),
    "llg_matcher_is_stopped": (ctypes.c_bool, (_P,)),
}
"""Function → what it returns, what it takes."""


class Library:
    """llguidance, found where its Python module is. Calls release the interpreter's lock."""

    def __init__(self, path: str) -> None:
        self._handle = ctypes.CDLL(path)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._handle, name)
            function.restype, function.argtypes = result, arguments

    def address(self, name: str) -> int:
        """Address of a function, for native callers."""
        return ctypes.cast(getattr(self._handle, name), ctypes.c_void_p).value or 0

    def call(self, name: str, *arguments: Any) -> Any:
        """A function of the header."""
        return getattr(self._handle, name)(*arguments)

    def new_tokenizer(self, document: bytes, end_ids: list[int], tokenize: Callable[..., int]) -> int:
        """From the contents of a tokenizer.json. tokenize: a TOKENIZE, which must live as long. Raises RequestError."""
        others = (ctypes.c_uint32 * max(len(end_ids) - 1, 1))(*end_ids[1:])
        init = TokenizerInit(
            struct_size=ctypes.sizeof(TokenizerInit),
            tok_eos=end_ids[0],
            tokenizer_json=document,
            tokenize_assumes_string=True,
            tokenize_fn=tokenize,
            tok_eos_extra=ctypes.cast(others, ctypes.c_void_p),
            tok_eos_extra_count=len(end_ids) - 1,
        )
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        made = self.call("llg_new_tokenizer_v2", ctypes.byref(init), message, _MESSAGE_BYTES)
        if not made:
            raise RequestError(
                "grammars: llguidance cannot read the engine's tokenizer",
                got=message.value.decode(errors="replace")[:400],
                hint="leave structured outputs out for this engine",
            )
        return int(made)

    def new_init(self, tokenizer: int, limits: Mapping[str, int]) -> ConstraintInit:
        """For matchers and for `validate`. limits: of ParserLimits, those that are not the library's defaults."""
        init = ConstraintInit()
        self.call("llg_constraint_init_set_defaults", ctypes.byref(init), tokenizer)
        init.log_buffer_level = init.log_stderr_level = 0
        for name, value in limits.items():
            setattr(init.limits, name, value)
        return init

    def validate(self, init: ConstraintInit, kind: str, text: str) -> str | None:
        """Why a grammar is none, in the library's words, or None."""
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        status = self.call(
            "llg_validate_grammar", ctypes.byref(init), kind.encode(), text.encode(), message, _MESSAGE_BYTES
        )
        return message.value.decode(errors="replace") if status < 0 else None


@functools.cache
def load_library() -> Library:
    """Raises RequestError where llguidance is not installed, or is of another version."""
    try:
        import llguidance._lib as module
    except ImportError as error:
        raise RequestError(
            "grammars need the package llguidance, which is not installed here", got=str(error), hint=_INSTALL
        ) from error
    version = _version()
    if not _LOWEST <= version < _BEYOND:
        raise RequestError(
            "grammars need another version of llguidance",
            expected="at least 1.9, below 2",
            got=".".join(map(str, version)),
            hint=_INSTALL,
        )
    return Library(str(module.__file__))


def _version() -> tuple[int, ...]:
    parts = importlib.metadata.version("llguidance").split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())
