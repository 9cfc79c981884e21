"""The models that use MLA, by name, and the problems they pose.

>>> problem = problem_for_model("deepseek-v3", tokens=4096, tp=8)
>>> problem.form, problem.heads, problem.d_nope, problem.d_rope, problem.d_v
('dense', 16, 128, 64, 128)
>>> problem_for_model("glm-5", tokens=1024, context=65536).form        # it attends sparsely
'sparse'
"""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from openmla.errors import InvalidArgument, with_hint
from openmla.formats import BF16, FORMATS
from openmla.indexer.problem import INDEX_FORMS, IndexForm, IndexProblem
from openmla.problem import CACHE_FORMATS, FORMS, Form, Problem

Evidence = Literal["config class", "reported", "general knowledge"]
EVIDENCE = get_args(Evidence)
DEFAULT_PAGE_SIZE = 64


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
    """Rows of a sliding window, listed after the top-k."""
    one_row: bool = False
    """K and V are the same `kv_lora`-wide row, rope included, and there is no per-head form."""
    sink: bool = False
    index_heads: int = 0
    """Heads of an indexer that scores every key; 0 where there is none, or where it scores keys
    that were pooled or compressed before."""

    @property
    def form(self) -> Form:
        """How the model prefills: sparse when it selects rows, else dense."""
        return "sparse" if self.topk else "dense"


_MODELS = (
    Model("deepseek-v2", 128, 512, 128, 64, 128, evidence="general knowledge"),
    Model("deepseek-v2-lite", 16, 512, 128, 64, 128, evidence="reported"),
    Model("deepseek-v3", 128, 512, 128, 64, 128),
    Model("deepseek-r1", 128, 512, 128, 64, 128),
    Model("deepseek-v3.1", 128, 512, 128, 64, 128),
    Model("deepseek-v3.2", 128, 512, 128, 64, 128, topk=2048, index_heads=64),
    Model(
        "deepseek-v4-flash", 64, 512, 448, 64, 512, topk=512, window=128, one_row=True, sink=True
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
    ),
    Model("kimi-k2", 64, 512, 128, 64, 128, evidence="reported"),
    Model("kimi-k2.5", 64, 512, 128, 64, 128, evidence="reported"),
    Model("kimi-linear-48b", 32, 512, 128, 64, 128),
    Model("kimi-k3", 96, 512, 128, 64, 128, evidence="reported"),
    Model("glm-5", 64, 512, 192, 64, 256, topk=2048, index_heads=32),
    Model("glm-5.3-flash", 64, 512, 256, 0, 256, topk=2048),
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
) -> Problem:
    """The problem a model poses on one of `tp` ranks: one sequence of `tokens` new tokens.

    `context` counts all keys, new ones included; 0 means no more than the new ones. `dtype` is
    that of Q, K and V, or an FP8 cache format, beside which Q stays bf16. `form` "" is the
    model's own. The latent and sparse forms read pages of 64 unless told otherwise.
    """
    model = model_by_name(name)
    chosen = form or model.form
    heads = _heads_per_rank(model, tp)
    keys = _check_counts(tokens, context, page_size)
    if chosen not in FORMS:
        raise InvalidArgument("form", "one of " + ", ".join(FORMS), repr(form))
    if dtype not in DTYPES:
        raise InvalidArgument("dtype", "one of " + ", ".join(DTYPES), repr(dtype))
    if chosen == "dense":
        return _dense_problem(model, heads, (tokens, keys), page_size, dtype)
    return _latent_problem(model, cast(Form, chosen), heads, (tokens, keys), page_size, dtype)


def index_problem_for_model(
    name: str, *, tokens: int = 4096, context: int = 0, page_size: int = 0, form: str = "scores"
) -> IndexProblem:
    """The step that a model's indexer takes on every rank: one sequence of `tokens` new tokens.

    `context` counts all keys, as in `problem_for_model`. Keys lie in pages of 64 unless told
    otherwise; a selection is written as the physical rows of these pages.

    >>> print(index_problem_for_model("deepseek-v3.2", context=32768))
    scores, 64 heads, 4096 queries x 32768 keys, pages of 64
    >>> print(index_problem_for_model("deepseek-v3.2", context=32768, form="select"))
    select, top-2048 of 4096 rows x 32768 scores, pages of 64
    """
    model, page = model_by_name(name), page_size or DEFAULT_PAGE_SIZE
    keys = _check_counts(tokens, context, page_size)
    if form not in INDEX_FORMS:
        raise InvalidArgument("form", "one of " + ", ".join(INDEX_FORMS), repr(form))
    if not model.index_heads:
        forms = ", ".join(FORMS)
        raise InvalidArgument("form", f"one of {forms}: {name} has no indexer of all keys", form)
    return IndexProblem(
        form=cast(IndexForm, form),
        heads=model.index_heads if form == "scores" else 0,
        topk=model.topk if form == "select" else 0,
        page_size=page,
        total_q=tokens,
        width=-(-keys // page) * page,
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
        raise InvalidArgument(
            "dtype", "bf16, fp16 or e4m3, unless page_size names a cache", repr(dtype)
        )
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
        topk=model.topk + model.window if form == "sparse" else 0,
        has_sink=model.sink,
        total_q=tokens,
        total_k=-(-keys // page) * page,
    )


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
