"""Log-probabilities, greedy text and perplexity of both real models, against llama.cpp."""

from __future__ import annotations

import math

import numpy as np
import pytest

from .conftest import GREEDY_PROMPTS, GREEDY_TOKENS, TOP, Pair, Place

NUM_POSITIONS = 64
POSITION_STRIDE = 10  # the last position is 630, beyond Gemma's sliding window of 512
PERPLEXITY_TOLERANCE = 0.005
