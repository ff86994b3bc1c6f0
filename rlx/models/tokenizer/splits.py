r"""How byte-level BPE vocabularies cut a text into words before they merge, by the names that GGUF files give.

A variant is a list of regular expressions in the syntax of Oniguruma: each cuts what the one before left into its
matches and what lies between. They are those of the models' own tokenizer.json files; the names (`tokenizer.ggml.pre`)
are those of llama.cpp's converter.
"""

from __future__ import annotations

from rlx.errors import ModelFormatError
from rlx.records import dataclass, replace

__all__ = ["VARIANTS", "Variant", "variant_of"]


@dataclass(frozen=True)
class Variant:
    """How to cut: `nfc`: characters are composed first; `whole`: a word that is a token is not merged together.

    `bos`: a text begins with BOS where the file doesn't say; `ends`: it also ends with SEP. `spaced`: tokens are text
    with ▁ for spaces, not characters that stand for bytes.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    whole: bool = False
    bos: bool = False
    ends: bool = False
    spaced: bool = False


_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GAPS = r"\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_GAPS}"


def _words(numbers: str, *, suffix: str = f"{_SUFFIX}|", letter: str = r"\p{L}", gaps: str = _GAPS) -> str:
    """Words with the character before them, numbers, and marks with the line breaks after them."""
    mark = r"[^\s\p{L}\p{N}]" if letter == r"\p{L}" else r"[^\s\p{L}\p{M}\p{N}]"
    return rf"{suffix}[^\r\n\p{{L}}\p{{N}}]?{letter}+|{numbers}| ?{mark}+[\r\n]*|\s*[\r\n]+|{gaps}"


def _cased(numbers: str, suffix: str) -> str:
    """As `_words`, and a capital after a small letter begins a word."""
    big, small = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{big}*{small}+{suffix}|{before}{big}+{small}*{suffix}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_GAPS}"
    )


# The letters with two cases of Unicode 11, but for some scripts, as DeepSeek's first files list them.
_DEEPSEEK_LETTERS = """
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1
    3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A
    1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4
    1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128
    212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D
    A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3
    104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""


def _characters(ranges: str) -> str:
    return "".join("-".join(rf"\x{{{end}}}" for end in entry.split("-")) for entry in ranges.split())


_ASIAN = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_characters(_DEEPSEEK_LETTERS)}]+",
    rf"\s?[{_characters('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+",
    r"\s+$",
    _ASIAN,
    _DIGIT,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, _DIGIT)
_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_GAPS}"
)
_DEEPSEEK_3 = (r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+", _DEEPSEEK_WORDS)
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_SENTENCES = r" ?[^(\s|[.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C}])]+"
_STEPS_OF_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"
_EXAONE_MOE = (
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_GAPS}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_GAPS}"
)
_SEED = (
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
    rf"|\s*[\r\n]+|{_GAPS}"
)

_GPT2_WORDS = Variant((_GPT2,))
_DIGITS_APART = Variant((_DIGIT, _GPT2))
_LLAMA_3 = Variant((_words(r"\p{N}{1,3}"),))
_QWEN_2 = Variant((_words(_DIGIT),))
_GPT_4O = Variant((_cased(r"\p{N}{1,3}", f"{_SUFFIX}?"),))
_DEEPSEEK_V3 = Variant(_DEEPSEEK_3)
_LINES = Variant((r"[^\n]+|[\n]+",), spaced=True)


def _table() -> dict[str, Variant]:
    """The variants by name; names of one line mean the same."""
    lines: list[tuple[str, Variant]] = [
        ("default", Variant(_DEFAULT)),
        ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
         replace(_LLAMA_3, whole=True, bos=True)),
        ("dbrx smaug-bpe chatglm-bpe", _LLAMA_3),
        ("glm4 glm5", replace(_LLAMA_3, whole=True)),
        ("jais-2", Variant((_words(r"\p{N}{1,3}", gaps=_STEPS_OF_SPACES),))),
        ("minicpm5", Variant((r"\p{N}{1,3}", _words(r"\p{N}+")), whole=True)),
        ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez", replace(_QWEN_2, nfc=True)),
        ("qwen35", Variant((_words(_DIGIT, letter=r"[\p{L}\p{M}]"),))),
        ("stablelm2 hunyuan solar-open grok-2", _QWEN_2),
        ("ufakzeka", Variant((_words(_DIGIT, suffix=""),))),
        ("laguna", Variant((r"[^\n]+|[\n]+", _words(_DIGIT)))),
        ("gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de modern-bert granite-docling", _GPT2_WORDS),
        ("gigachat a.x-4.0 mellum exaone4 jais trillion", _GPT2_WORDS),
        ("mpt olmo", replace(_GPT2_WORDS, nfc=True)),
        ("jina-v1-en jina-v2-code roberta-bpe", replace(_GPT2_WORDS, ends=True)),
        ("starcoder refact smollm codeshell exaone minerva-7b mellum2", _DIGITS_APART),
        ("command-r", replace(_DIGITS_APART, nfc=True)),
        ("falcon", Variant(_FALCON)),
        ("deepseek-llm", Variant(_DEEPSEEK_LLM)),
        ("deepseek-coder", Variant(_DEEPSEEK_CODER)),
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK_V3),
        ("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT_4O),
        ("granite-embed-multi-97m", replace(_GPT_4O, whole=True)),
        ("tiny_aya cohere2moe", Variant((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT_4O.splits))),
        ("tekken", Variant((_cased(_DIGIT, ""),), whole=True, bos=True)),
        ("poro-chat bloom gpt3-finnish", Variant((_SENTENCES,))),
        ("viking", Variant((_SENTENCES, _DIGIT))),
        ("superbpe", Variant((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
        ("exaone-moe", Variant((_EXAONE_MOE,))),
        ("bailingmoe bailingmoe2 llada-moe", Variant((_BAILING,))),
        ("seed-coder", Variant((_SEED,))),
        ("gemma4 granite-embed-multi-311m", replace(_LINES, bos=True)),
        ("sarvam-moe", _LINES),
    ]  # fmt: skip
    return {name: variant for names, variant in lines for name in names.split()}


VARIANTS: dict[str, Variant] = _table()


def variant_of(name: str, where: str) -> Variant:
    """The variant of a name. Raises `ModelFormatError`, which lists those known."""
    found = VARIANTS.get(name)
    if found is None:
        raise ModelFormatError(
            f"{where}: tokenizer.ggml.pre is {name!r}, a way to cut words that rlx doesn't know; known are "
            f"{', '.join(sorted(VARIANTS))}. The model's folder with its tokenizer.json may load"
        )
    return found
