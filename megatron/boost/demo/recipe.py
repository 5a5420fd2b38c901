"""What the demo trains: one recipe, three strategies, as flags of pretrain_gpt.py."""

from dataclasses import dataclass
from pathlib import Path

from megatron.boost.corpus import Corpus

RANKS = 2


@dataclass(frozen=True)
class Strategy:
    """One of the compared ways to train the model."""

    key: str
    """For JSON keys."""
    title: str
    """For people."""
    flags: tuple[str, ...]

    @property
    def low_rank(self) -> bool:
        """Whether its projections are factorised."""
        return "dense" not in self.flags

    @property
    def folder(self) -> str:
        """The name of the folder that its run writes to."""
        return self.key.replace("_", "-")


COLA_BTP = Strategy("cola_btp", "CoLA, BTP", ("--low-rank-arch", "cola", "--low-rank-tp", "btp"))
FULL_RANK = Strategy("full_rank", "full-rank", ("--low-rank-arch", "dense"))
COLA_VANILLA = Strategy(
    "cola_vanilla", "CoLA, vanilla TP", ("--low-rank-arch", "cola", "--low-rank-tp", "vanilla")
)
STRATEGIES = (COLA_BTP, FULL_RANK, COLA_VANILLA)


@dataclass(frozen=True)
class Recipe:
    """Everything that the three runs share."""

    steps: int = 250
    hidden: int = 512
    ffn_hidden: int = 1376
    layers: int = 4
    heads: int = 8
    sequence: int = 256
    micro_batch: int = 4
    rank_ratio: float = 0.25
    learning_rate: float = 1e-3
    warmup_share: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    validation_batches: int = 20
    seed: int = 1234

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one iteration trains on."""
        return self.micro_batch * self.sequence

    def flags(self, corpus: Corpus, index_cache: Path) -> list[str]:
        """Megatron's flags, the same for every strategy."""
        settings: dict[str, object] = {
            "tensor-model-parallel-size": RANKS,
            "num-layers": self.layers,
            "hidden-size": self.hidden,
            "ffn-hidden-size": self.ffn_hidden,
            "num-attention-heads": self.heads,
            "seq-length": self.sequence,
            "max-position-embeddings": self.sequence,
            "position-embedding-type": "rope",
            "normalization": "RMSNorm",
            "micro-batch-size": self.micro_batch,
            "global-batch-size": self.micro_batch,
            "train-iters": self.steps,
            "optimizer": "adam",
            "adam-beta2": 0.95,
            "lr": self.learning_rate,
            "min-lr": self.learning_rate / 10,
            "lr-decay-style": "cosine",
            "lr-warmup-iters": round(self.steps * self.warmup_share),
            "weight-decay": self.weight_decay,
            "clip-grad": self.clip,
            "seed": self.seed,
            "tokenizer-type": "HuggingFaceTokenizer",
            "tokenizer-model": corpus.tokenizer_model,
            "train-data-path": corpus.train_data_path,
            "valid-data-path": corpus.validation_data_path,
            "data-cache-path": index_cache,
            "num-workers": 0,
            "log-interval": 1,
            # Megatron evaluates once more at the end: only that one is wanted.
            "eval-interval": self.steps + 1,
            "eval-iters": self.validation_batches,
        }
        switches = ["swiglu", "disable-bias-linear", "untie-embeddings-and-output-weights"]
        flags = ["--device", "cpu"]
        for name, value in settings.items():
            flags += [f"--{name}", str(value)]
        return flags + [f"--{name}" for name in switches]
