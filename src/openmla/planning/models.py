"""The models that use MLA, by name, and the problems they pose.

>>> problem = problem_for_model("deepseek-v3", tokens=4096, tp=8)
>>> problem.form, problem.heads, problem.d_nope, problem.d_rope, problem.d_v
('dense', 16, 128, 64, 128)
>>> problem_for_model("glm-5", tokens=1024, context=65536).form        # it attends sparsely
'sparse'
>>> v4 = problem_for_model("deepseek-v4-flash", tokens=1, context=65536)     # a window, and a list
>>> [(source.topk, source.total_k) for source in v4.sources]
[(128, 65536), (512, 16384)]
"""

from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from openmla.errors import InvalidArgument, with_hint
from openmla.formats import BF16, FORMATS
from openmla.indexer.problem import INDEX_FORMS, IndexForm, IndexProblem
from openmla.problem import CACHE_FORMATS, FORMS, Form, Problem, RowSource

Evidence = Literal["config class", "reported", "general knowledge"]
EVIDENCE = get_args(Evidence)
DEFAULT_PAGE_SIZE = 64


@dataclass(frozen=True, slots=True)
class Compressed:
    """Layers that attend to rows which stand for several tokens, beside a window of all tokens."""

    layers: int
    ratio: int
    """Tokens per row; 0 for layers that see the window alone."""
    selects: bool = False
    """Whether an indexer chooses the top-k of them; otherwise a query sees all rows so far."""

    def __str__(self) -> str:
        which = "" if self.selects or not self.ratio else ", all rows"
        return (
            f"{self.layers} of ratio {self.ratio}{which}"
            if self.ratio
            else (f"{self.layers} of the window alone")
        )


@dataclass(frozen=True, slots=True)
class Model:
    """One model's attention. `evidence` says how the numbers are known.

    "config class": defaults of its configuration class in transformers, tilelang or SGLang, which
    a released checkpoint may override. "reported": quoted in public discussions. The rest is
    unverified.
    """

    name: str
    heads: int
    kv_lora: int
    nope: int
    rope: int
    v: int
    topk: int = 0
    """Rows each query attends to; 0 when it attends to all."""
    evidence: Evidence = "config class"
    window: int = 0
    """Rows of a sliding window, in the same softmax as the rows of `compressed`."""
    one_row: bool = False
    """K and V are the same `kv_lora`-wide row, rope included, and there is no per-head form."""
    sink: bool = False
    index_heads: int = 0
    """Heads of an indexer; 0 where there is none."""
    index_pool: int = 1
    """Consecutive tokens that an indexer scores by one key and selects together. A query sees the
    tokens of an unfinished pool besides."""
    compressed: tuple[Compressed, ...] = ()
    """Kinds of layers of a model with compressed rows, in the order of their first layers."""
    layers: int = 0
    """All layers, where those without MLA are counted; 0 where every layer is MLA."""
    mla_layers: int = 0

    @property
    def form(self) -> Form:
        """How the model prefills: sparse when it selects rows, else dense."""
        return "sparse" if self.topk else "dense"

    @property
    def ratios(self) -> tuple[int, ...]:
        """Ratios of its layers; () where no rows are compressed."""
        return tuple(kind.ratio for kind in self.compressed)

    def kind_of(self, ratio: int | None) -> Compressed | None:
        """The layers with a ratio; the first that select rows for None, if any are compressed."""
        if ratio is None:
            return next((kind for kind in self.compressed if kind.selects), None)
        if ratio not in self.ratios:
            known = ", ".join(map(str, self.ratios))
            which = f"one of {known}" if known else f"none: {self.name} compresses no rows"
            raise InvalidArgument("ratio", which, ratio)
        return self.compressed[self.ratios.index(ratio)]

    def describe_layers(self) -> str:
        """Which layers it has, where they differ; "" where all are alike."""
        if self.compressed:
            count = sum(kind.layers for kind in self.compressed)
            return f"{count} layers: " + "; ".join(map(str, self.compressed))
        return f"{self.mla_layers} of {self.layers} layers are MLA" if self.layers else ""


_MODELS = (
    Model("deepseek-v2", 128, 512, 128, 64, 128, evidence="general knowledge"),
    Model("deepseek-v2-lite", 16, 512, 128, 64, 128, evidence="reported"),
    Model("deepseek-v3", 128, 512, 128, 64, 128),
    Model("deepseek-r1", 128, 512, 128, 64, 128),
    Model("deepseek-v3.1", 128, 512, 128, 64, 128),
    Model("deepseek-v3.2", 128, 512, 128, 64, 128, topk=2048, index_heads=64),
    Model(
        "deepseek-v4-flash",
        64,
        512,
        448,
        64,
        512,
        topk=512,
        window=128,
        one_row=True,
        sink=True,
        index_heads=64,
        compressed=(Compressed(2, 0), Compressed(21, 4, selects=True), Compressed(20, 128)),
    ),
    Model(
        "deepseek-v4-pro",
        128,
        512,
        448,
        64,
        512,
        topk=1024,
        evidence="reported",
        window=128,
        one_row=True,
        sink=True,
        index_heads=64,
        compressed=(Compressed(31, 128), Compressed(30, 4, selects=True)),
    ),
    Model(
        "deepseek-v4.1-flash",
        64,
        512,
        448,
        64,
        512,
        topk=512,
        evidence="reported",
        window=128,
        one_row=True,
        sink=True,
        index_heads=32,
        compressed=(
            Compressed(2, 0),
            Compressed(18, 2, selects=True),
            Compressed(20, 1, selects=True),
        ),
    ),
    Model("kimi-k2", 64, 512, 128, 64, 128, evidence="reported"),
    Model("kimi-k2.5", 64, 512, 128, 64, 128, evidence="reported"),
    Model("kimi-linear-48b", 32, 512, 128, 64, 128),
    Model("kimi-k3", 96, 512, 128, 64, 128, evidence="reported", layers=93, mla_layers=24),
    Model("glm-5", 64, 512, 192, 64, 256, topk=2048, index_heads=32),
    Model(
        "glm-5.3-flash",
        64,
        512,
        256,
        0,
        256,
        topk=2048,
        index_heads=32,
        index_pool=4,
        layers=45,
        mla_layers=11,
    ),
    Model("glm-4.7-flash", 20, 512, 192, 64, 256),
    Model("hy4-preview", 32, 512, 192, 64, 256, topk=2048, index_heads=16),
    Model("mistral-large-4", 64, 512, 64, 64, 128, topk=2048, index_heads=32),
    Model("mistral-small-4", 32, 256, 64, 64, 128),
    Model("mistral-large-3", 128, 512, 128, 64, 128, evidence="general knowledge"),
    Model("longcat-flash", 64, 512, 128, 64, 128),
    Model("ling-3.0-flash", 32, 512, 128, 64, 128),
    Model("minicpm3-4b", 40, 256, 64, 32, 64),
    Model("youtu-llm-2b", 16, 512, 128, 64, 128),
    Model("a.x-k1", 64, 512, 128, 64, 128),
    Model("a.x-k2", 32, 128, 64, 32, 64, topk=2048, index_heads=16),
    Model("dots3", 64, 512, 128, 64, 128),
)
MODELS = {model.name: model for model in _MODELS}
DTYPES = ("bf16", "fp16", "e4m3", *(name for name in CACHE_FORMATS if name != "bf16"))


def model_by_name(name: str) -> Model:
    """The model called `name`, or an error that lists all and says which may have been meant.

    Case does not matter, nor does who published it: "deepseek-ai/DeepSeek-V3" is "deepseek-v3".
    """
    model = MODELS.get(name.strip().lower().rpartition("/")[2])
    if model is None:
        raise InvalidArgument("model", "one of " + ", ".join(MODELS), with_hint(name, MODELS))
    return model


def problem_for_model(
    name: str,
    *,
    tokens: int = 4096,
    context: int = 0,
    tp: int = 1,
    page_size: int = 0,
    dtype: str = "bf16",
    form: str = "",
    ratio: int | None = None,
) -> Problem:
    """The problem a model poses on one of `tp` ranks: one sequence of `tokens` new tokens.

    `context` counts all keys, new ones included; 0 means no more than the new ones. `dtype` is
    that of Q, K and V, or a quantized cache format, beside which Q stays bf16. `form` "" is the
    model's own. The latent and sparse forms read pages of 64 unless told otherwise.

    `ratio` chooses a layer of a model that compresses rows, the selecting one unless told; window
    and compressed rows are posed as two lists, as engines pass them.
    """
    model = model_by_name(name)
    kind = model.kind_of(ratio)
    chosen = form or model.form
    heads = _heads_per_rank(model, tp)
    keys = _check_counts(tokens, context, page_size)
    if chosen not in FORMS:
        raise InvalidArgument("form", "one of " + ", ".join(FORMS), repr(form))
    if dtype not in DTYPES:
        raise InvalidArgument("dtype", "one of " + ", ".join(DTYPES), repr(dtype))
    if chosen == "dense":
        return _dense_problem(model, heads, (tokens, keys), page_size, dtype)
    whole = _latent_problem(model, cast(Form, chosen), heads, (tokens, keys), page_size, dtype)
    return whole if kind is None or chosen != "sparse" else _with_window(whole, model, kind, keys)


def index_problem_for_model(
    name: str,
    *,
    tokens: int = 4096,
    context: int = 0,
    page_size: int = 0,
    form: str = "scores",
    ratio: int | None = None,
) -> IndexProblem:
    """The step that a model's indexer takes on every rank: one sequence of `tokens` new tokens.

    `context` counts all keys, as in `problem_for_model`. Keys lie in pages of 64 unless told
    otherwise; a selection is written as the physical rows of these pages. Where keys are pooled or
    compressed first, one key stands for several tokens.

    >>> print(index_problem_for_model("deepseek-v3.2", context=32768))
    scores, 64 heads, 4096 queries x 32768 keys, pages of 64
    >>> print(index_problem_for_model("deepseek-v3.2", context=32768, form="select"))
    select, top-2048 of 4096 rows x 32768 scores, pages of 64
    >>> print(index_problem_for_model("deepseek-v4-flash", context=32768))      # ratio 4
    scores, 64 heads, 4096 queries x 8192 keys, pages of 64
    """
    model, page = model_by_name(name), page_size or DEFAULT_PAGE_SIZE
    keys = _check_counts(tokens, context, page_size)
    if form not in INDEX_FORMS:
        raise InvalidArgument("form", "one of " + ", ".join(INDEX_FORMS), repr(form))
    kind = model.kind_of(ratio)
    if not model.index_heads or (kind is not None and not kind.selects):
        forms, where = ", ".join(FORMS), f" at ratio {ratio}" if kind else ""
        raise InvalidArgument("form", f"one of {forms}: {name} has no indexer{where}", form)
    per_key = model.index_pool if kind is None else kind.ratio
    scored = max(keys // per_key, 1)
    return IndexProblem(
        form=cast(IndexForm, form),
        heads=model.index_heads if form == "scores" else 0,
        topk=model.topk // model.index_pool if form == "select" else 0,
        page_size=page,
        total_q=tokens,
        width=-(-scored // page) * page,
        batch=1,
    )


def _dense_problem(
    model: Model, heads: int, lengths: tuple[int, int], page_size: int, dtype: str
) -> Problem:
    if model.one_row:
        row = f"one row of {model.kv_lora} as K and V"
        raise InvalidArgument("form", f"latent or sparse: {model.name} keeps {row}", "dense")
    element = "bf16" if dtype in CACHE_FORMATS else dtype
    from_cache = page_size > 0 and model.rope > 0
    if dtype in CACHE_FORMATS and dtype != "bf16" and not from_cache:
        expected = (
            "bf16, fp16 or e4m3 in dense form (a cache format goes with form 'latent' or 'sparse', "
            "or with a page_size, whose pages have the rope)"
        )
        raise InvalidArgument("dtype", expected, repr(dtype))
    rope_dtype = (dtype if dtype in CACHE_FORMATS else "bf16") if from_cache else element
    return Problem(
        form="dense",
        heads=heads,
        d_nope=model.nope,
        d_rope=model.rope,
        d_v=model.v,
        q_dtype=element,
        kv_dtype=element,
        v_dtype=element,
        rope="cache" if from_cache else "shared" if model.rope else "none",
        rope_dtype=rope_dtype,
        page_size=page_size if from_cache else 0,
        has_sink=model.sink,
        total_q=lengths[0],
        total_k=lengths[1],
        self_attention=lengths[0] == lengths[1],
    )


def _latent_problem(
    model: Model, form: Form, heads: int, lengths: tuple[int, int], page_size: int, dtype: str
) -> Problem:
    tokens, keys = lengths
    page = page_size or DEFAULT_PAGE_SIZE
    if form == "sparse" and not model.topk:
        raise InvalidArgument("form", f"dense or latent: {model.name} selects no rows", "sparse")
    rope = 0 if model.one_row else model.rope
    if not FORMATS.get(dtype, BF16).takes(model.kv_lora, rope):
        row = f"a format for the {model.kv_lora} + {rope} columns of {model.name}"
        raise InvalidArgument("dtype", row, repr(dtype))
    element = "bf16" if dtype in CACHE_FORMATS else dtype
    return Problem(
        form=form,
        heads=heads,
        d_nope=model.kv_lora,
        d_rope=rope,
        d_v=model.kv_lora,
        q_dtype=element,
        kv_dtype=dtype,
        v_dtype=dtype,
        rope_dtype=dtype,
        rope="cache" if rope else "none",
        page_size=page,
        topk=model.topk + model.index_pool - 1 if form == "sparse" else 0,
        has_sink=model.sink,
        total_q=tokens,
        total_k=-(-keys // page) * page,
    )


def _with_window(whole: Problem, model: Model, kind: Compressed, keys: int) -> Problem:
    """The list of a window over all tokens, then one over the compressed rows."""
    window = replace(whole, topk=model.window)
    if not kind.ratio:
        return window
    entries, page = max(keys // kind.ratio, 1), whole.page_size
    compressed = RowSource(
        kv_dtype=whole.kv_dtype,
        page_size=page,
        topk=model.topk if kind.selects else entries,
        total_k=-(-entries // page) * page,
    )
    return replace(window, second=compressed)


def _heads_per_rank(model: Model, tp: int) -> int:
    if type(tp) is not int or tp < 1:
        raise InvalidArgument("tp", "an integer of at least 1", repr(tp))
    if model.heads % tp:
        heads = f"{model.heads} = {model.heads // tp} x {tp} + {model.heads % tp}"
        raise InvalidArgument("tp", f"a divisor of the {model.heads} heads", f"{tp} ({heads})")
    return model.heads // tp


def _check_counts(tokens: int, context: int, page_size: int) -> int:
    """The number of keys."""
    for name, value in (("tokens", tokens), ("context", context), ("page_size", page_size)):
        if type(value) is not int or value < 0:
            raise InvalidArgument(name, "an integer of at least 0", repr(value))
    if context and context < tokens:
        raise InvalidArgument("context", f"at least the {tokens} new tokens", context)
    return context or tokens
