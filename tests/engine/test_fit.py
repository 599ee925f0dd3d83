"""Memory is decided before anything is loaded, and a refusal says what would fit."""

from __future__ import annotations

import pytest

from headrace.engine.fit import WORKING_BYTES, plan_memory
from headrace.errors import MemoryLimitError, OptionError
from headrace.kv.pages import PAGE_TOKENS, page_bytes
from headrace.model.config import LayerConfig, ModelConfig, RopeConfig

CONFIG = ModelConfig(
    architecture="llama",
    name="Test 1B",
    context_tokens=4096,
    vocabulary=1000,
    embedding_width=2048,
    feed_forward_width=8192,
    heads=32,
    kv_heads=8,
    head_width=64,
    norm_epsilon=1e-5,
    layers=(LayerConfig(),) * 16,
    ropes=(RopeConfig(1e4, 64),),
)
WEIGHTS = 700 * 10**6
PAGE = page_bytes(CONFIG)  # 1 MiB
CONTEXT_PAGES = 4096 // PAGE_TOKENS


def _free(pages: int) -> int:
    return WEIGHTS + WORKING_BYTES + pages * PAGE


def test_plan_takes_the_whole_context_and_room_for_several_where_it_fits() -> None:
    plan = plan_memory(CONFIG, WEIGHTS, None, _free(1000))
    assert (plan.context_tokens, plan.num_pages) == (4096, 4 * CONTEXT_PAGES)
    assert plan.kv_bytes_per_token == 16 * 8 * 64 * 2 * 2
    assert plan_memory(CONFIG, WEIGHTS, None, _free(300)).num_pages == 300
    assert plan_memory(CONFIG, WEIGHTS, None, None) == plan


def test_plan_shortens_the_context_that_nobody_asked_for() -> None:
    plan = plan_memory(CONFIG, WEIGHTS, None, _free(10))
    assert (plan.context_tokens, plan.num_pages) == (320, 10)


def test_plan_keeps_the_context_that_was_asked_for() -> None:
    plan = plan_memory(CONFIG, WEIGHTS, 100, _free(4))
    assert (plan.context_tokens, plan.num_pages) == (100, 4)


def test_refusal_says_what_is_needed_what_is_free_and_what_would_fit() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        plan_memory(CONFIG, WEIGHTS, 4096, _free(100))
    assert str(caught.value) == (
        "Test 1B with a context of 4096 tokens needs 1.08 GB (weights 700 MB, keys and values 134 MB, "
        "working memory 250 MB) and 1.05 GB are free: context=3200 would fit"
    )


def test_refusal_without_room_for_weights_says_so() -> None:
    with pytest.raises(MemoryLimitError, match="no context fits: free memory or use a smaller model"):
        plan_memory(CONFIG, WEIGHTS, None, WEIGHTS)


@pytest.mark.parametrize("context", [0, -5, 4097])
def test_context_out_of_range_is_refused(context: int) -> None:
    with pytest.raises(OptionError, match=f"context={context}.*1 to 4096"):
        plan_memory(CONFIG, WEIGHTS, context, None)
