from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from headrace.errors import TemplateError
from headrace.text.template_sandbox import BoundedTemplate

VARIABLES: dict[str, Any] = {"messages": [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "yo"}]}


def _render(source: str, now: datetime | None = None) -> str:
    return BoundedTemplate(source).render(VARIABLES, now=now, max_characters=10_000)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ loop.index }}{{ m.role }}{{ loop.last }} {% endfor %}", "1userFalse 2assistantTrue "),
        ("{% for m in messages %}{{ m['content'] }}{% break %}{% endfor %}", "hé"),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hé"}'),
        ("{{ {'b': 1, 'a': '<'} | tojson(indent=1, sort_keys=true) }}", '{\n "a": "<",\n "b": 1\n}'),
        ("{% generation %}a{{ messages[1].content }}{% endgeneration %}b", "ayob"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user, assistant"),
        ("{{ messages | join('-', attribute='content') }}{{ ','.join(['a', 'b']) }}", "hé-yoa,b"),
        ("{{ 'a\nb\n\nc' | indent(2) }}", "a\n  b\n\n  c"),
        ("{{ 'a-b-c' | replace('-', '+', 1) }}{{ 'aa'.replace('a', 'b') }}", "a+b-cbb"),
        ("{{ 'ab' * 2 ~ 3 ~ none }}{{ 2 ** 3 }}{{ '%s-%d' % ('a', 3) }}{{ '{:>3}'.format(1) }}", "abab3None8a-3  1"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) }}{{ strftime_now is defined }}", "[1]False"),
        ("{% for i in range(3) recursive %}{{ i }}{% endfor %}{{ messages[::-1][0].role }}", "012assistant"),
    ],
)
def test_template_speaks_the_dialect_of_chat_templates(source: str, text: str) -> None:
    assert _render(source) == text


def test_template_tells_the_time_that_it_is_given() -> None:
    assert _render("{{ strftime_now('%d %b %Y') }}", datetime(2024, 7, 26, tzinfo=UTC)) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages[7].content.x }}", "UndefinedError"),
        ("{{ strftime_now('%Y') }}", "strftime_now"),
        ("{% include 'x' %}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "250000 steps"),
        ("{% for i in [1, 2, 3, 4, 5, 6, 7, 8] %}" * 12 + "{% endfor %}" * 12, "250000 steps"),
        ("{% macro f(n) %}{% if n %}{% set x = f(n - 1) ~ f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}", "250000 steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(9999) %}xx{% endfor %}", "more than 10000 characters"),
        ("{{ 'a' * 10 ** 9 }}", "1e+09"),
        ("{{ 'a'.ljust(999999999) }}", "1e+09"),
        ("{{ '%999999999d' % 1 }}", "too wide"),
        ("{{ '%*d' % (999999999, 1) }}", "too wide"),
        ("{{ '{:>999999999}'.format(1) }}", "too wide"),
        ("{{ '{:>{}}'.format(1, 999999999) }}", "too wide"),
        ("{{ 9 ** 9 ** 9 }}", "too large"),
        ("{{ 10000000000000 }}", "1e+13"),
        ("{{ [messages] * 1000 }}", "repeats a list"),
        ("{{ ('a' * 99999) | replace('a', 'b' * 99999) }}", "too large"),
        ("{{ ('a' * 99999).replace('a', 'b' * 99999) }}", "too large"),
        ("{{ ('a' * 99999) | join('b' * 99999) }}", "too large"),
        ("{{ ('a' * 99999).join('b' * 99999) }}", "too large"),
        ("{{ ('\t' * 99999).expandtabs(99999) }}", "expandtabs"),
        ("{{ 'a' | indent(999999999) }}", "too large"),
        ("{{ 'a' | center(999999999) }}", "center"),
        ("{{ [1] | tojson(indent=999999999) }}", "too large"),
        ("{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "too large"),
        ("{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "too large"),
    ],
)
@pytest.mark.timeout(20)
def test_template_beyond_its_bounds_is_an_error(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match="chat template") as caught:
        _render(source)
    assert words in str(caught.value)


def test_template_starts_each_rendering_with_all_its_steps() -> None:
    template = BoundedTemplate("{% for i in range(90000) %}{% endfor %}done")
    for _ in range(4):
        assert template.render({}, now=None, max_characters=9) == "done"


def test_template_of_a_megabyte_is_refused() -> None:
    with pytest.raises(TemplateError, match="1048577 characters"):
        BoundedTemplate("x" * (2**20 + 1))
