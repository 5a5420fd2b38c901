"""Long documents encoded piece by piece: the tokens of the whole, for tokenizers of every make."""

import io
import random

import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from megatron.boost.corpus import library_sources
from megatron.boost.preprocessing import pieces
from megatron.boost.preprocessing.pieces import NoJoint, cut, encode_piece

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UNICODE = "Ünïcödé — 漢字と仮名、😀👩‍👩‍👧 “quotes” …\r\n\t  x\n\n"


def byte_level(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)


def llama_3(tokenizer):
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])


def llama_2(tokenizer):
    # No pre-tokenizer: a merge may span any number of words.
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )


def metaspace(tokenizer):
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()


def bert(tokenizer):
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


ALPHABET = pre_tokenizers.ByteLevel.alphabet()
MAKES = {
    "byte_level": (byte_level, models.BPE(), trainers.BpeTrainer(initial_alphabet=ALPHABET)),
    "llama_3": (llama_3, models.BPE(), trainers.BpeTrainer(initial_alphabet=ALPHABET)),
    "llama_2": (
        llama_2,
        models.BPE(unk_token="?", byte_fallback=True, fuse_unk=True),
        trainers.BpeTrainer(
            special_tokens=["?", *(f"<0x{byte:02X}>" for byte in range(256))], max_token_length=16
        ),
    ),
    "unigram": (
        metaspace,
        models.Unigram(),
        trainers.UnigramTrainer(special_tokens=["?"], unk_token="?"),
    ),
    "word_piece": (
        bert,
        models.WordPiece(unk_token="?"),
        trainers.WordPieceTrainer(special_tokens=["?"]),
    ),
}


@pytest.fixture(scope="module")
def text():
    """Some 120 kB of source with other scripts strewn in."""
    rng = random.Random(1)
    lines = "".join(source.text for source in library_sources()[:20])[:100_000].splitlines(True)
    return "".join(line + (UNICODE if rng.random() < 0.1 else "") for line in lines)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(pieces, "CONTEXT_BYTES", 1_000)


def tokenizer_of(make, text):
    prepare, model, trainer = MAKES[make]
    tokenizer = Tokenizer(model)
    prepare(tokenizer)
    trainer.vocab_size = 600
    trainer.show_progress = False
    tokenizer.train_from_iterator([text[:15_000]], trainer)
    return tokenizer


@pytest.mark.parametrize("make", MAKES)
def test_pieces_have_the_tokens_of_the_whole(make, text):
    tokenizer = tokenizer_of(make, text)
    parts = list(cut(io.BytesIO(text.encode()).read))

    encoded = [encode_piece(tokenizer, piece) for piece in parts]

    assert len(parts) > 10
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert sum(encoded, []) == whole
    # The pieces are encoded together with their contexts, which are not counted.
    assert len(whole) < sum(len(tokenizer.encode(p.data.decode()).ids) for p in parts)


def test_a_cut_that_goes_on_later_is_the_same(text):
    data = text.encode()
    parts = list(cut(io.BytesIO(data).read))

    for number in (1, len(parts) // 2, len(parts) - 1):
        begin = parts[number].at + parts[number].begin
        stream = io.BytesIO(data)
        stream.seek(pieces.context_begin(begin))
        assert list(cut(stream.read, begin)) == parts[number:]


@pytest.mark.parametrize("size", [0, 1, 3_000, 4_000, 4_400, 4_401, 4_402, 20_003])
def test_pieces_cover_the_document_and_split_no_character(size):
    data = ("aé漢😀" * (size // 4))[:size].encode()
    parts = list(cut(io.BytesIO(data).read))

    assert b"".join(part.data[part.begin : part.end] for part in parts) == data
    assert [part.first for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    for part in parts:
        part.data.decode()
        part.data[part.begin : part.end].decode()
        assert data[part.at : part.at + len(part.data)] == part.data


def test_tokens_that_depend_on_text_far_away_are_refused(monkeypatch):
    """In a run of one character its pairs begin where the run does, however far away that is."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 10_001)
    tokenizer = Tokenizer(models.BPE({"a": 0, "aa": 1}, [("a", "a")]))

    first, *_ = cut(io.BytesIO(b"a" * 50_000).read)

    with pytest.raises(NoJoint, match=r"around byte 10002 the tokens depend on text far away"):
        encode_piece(tokenizer, first)
