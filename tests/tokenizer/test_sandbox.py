"""Templates are strangers' input: no way out, and every kind of excess stops (S2)."""

import itertools
import threading

import pytest

from jaxserve.tokenizer import sandbox
from jaxserve.tokenizer.chat import ChatTemplate
from jaxserve.tokenizer.sandbox import BoundedEnvironment, TemplateError

USER = [{"role": "user", "content": "x"}]


def render(source, **arguments):
    return ChatTemplate(source).render(USER, **arguments).text


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'].__mro__ }}",
        "{{ messages.__class__.__base__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ ['']|map(attribute='__class__')|first|string ~ 1 / 0 }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ namespace.__init__.__globals__.x }}",
        "{{ self.__init__.__globals__.x }}",
        "{{ '{0.__class__.__mro__}'.format(1).x.y }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].pop('role') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends '/etc/passwd' %}",
        "{{ lipsum(n=5) }}",
    ],
)
def test_there_is_no_way_out(source):
    with pytest.raises(TemplateError):
        render(source)


DOUBLING_LISTS = "{% set x = ['a'] %}" + "{% set x = [x, x, x, x] %}" * 40
TWO_OF_THEM = DOUBLING_LISTS + DOUBLING_LISTS.replace("x", "y")
MILLION = "{% set x = 'a' * 1000000 %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 1000000000000 }}",
        "{{ ([1] * 100000000)|length }}",
        "{% set x = 'aaaa' %}" + "{% set x = x + x %}" * 60,
        "{% set x = 'aaaa' %}" + "{% set x = x ~ x %}" * 60,
        DOUBLING_LISTS + "{{ x }}",
        DOUBLING_LISTS + "{{ x|tojson }}",
        DOUBLING_LISTS + "{{ x|string }}",
        DOUBLING_LISTS + "{{ 'a' ~ x }}",
        DOUBLING_LISTS + "{{ '%s' % (x,) }}",
        DOUBLING_LISTS + "{{ '{}'.format(x) }}",
        TWO_OF_THEM + "{{ x == y }}",
        TWO_OF_THEM + "{{ x in [y] }}",
        TWO_OF_THEM + "{{ x is eq y }}",
        TWO_OF_THEM + "{{ [x]|reject('equalto', y)|list }}",
        TWO_OF_THEM + "{{ [x, y]|unique|list }}",
        TWO_OF_THEM + "{{ [x, y]|sort }}",
        TWO_OF_THEM + "{{ [x].index(y) }}",
        "{% set x = ('a',) %}" + "{% set x = (x, x, x, x) %}" * 40 + "{{ {x: 1} }}",
        "{% set x = {} %}" + "{% set x = dict(a=x, b=x, c=x) %}" * 40 + "{{ x }}",
        MILLION + "{{ x.replace('a', x) }}",
        MILLION + "{{ x|replace('', x) }}",
        MILLION + "{{ x.join(range(100000)|map('string')) }}",
        MILLION + "{{ range(100000)|join(x) }}",
        MILLION + "{{ ('a\n' * 1000000)|indent(x) }}",
        "{% macro f() %}{% for i in range(90000) %}{{ big }}{% endfor %}{% endmacro %}{{ f() }}",
        "{% set x %}{% for i in range(90000) %}{{ big }}{% endfor %}{% endset %}",
        "{% for i in range(90000) %}{{ big }}{% endfor %}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set x = 3 %}" + "{% set x = x * x %}" * 40,
        "{{ ('9' * 1000000)|int + 1 }}{{ 1 / 0 }}",
        "{{ '%1000000000d' % 3 }}",
        "{{ '%*d' % (1000000000, 3) }}",
        "{{ '%1000000000d'|format(3) }}",
        "{{ '{:1000000000}'.format(3) }}",
        "{{ '{:{w}}'.format(3, w=1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ messages|tojson(indent=1000000000) }}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 5000 + "]" * 5000 + " }}",
        "x" * (sandbox.MAX_TEMPLATE_CHARS + 1),
    ],
    ids=lambda source: source[-40:],
)
def test_excess_in_size_stops(source):
    with pytest.raises(TemplateError):
        render(source, big="b" * 1000000)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) if 0 %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% set x = range(100000)|list|reverse|list %}{% endfor %}",
        "{% macro f(n) %}{% for a in range(99) %}{{ f(n) if n else '' }}{% endfor %}{% endmacro %}"
        "{% for a in range(99) %}{% for b in range(99) %}{{ f(0) }}{% endfor %}{% endfor %}",
        "{% for x in range(99) recursive %}{% for y in range(9999) %}{% endfor %}"
        "{{ loop(range(99)) if loop.depth < 9 }}{% endfor %}",
        "{% set n = namespace(x='') %}{% for a in range(100000) %}{% for b in range(100000) %}"
        "{% set n.x = n.x[1:] + 'b' %}{% endfor %}{% endfor %}",
    ],
)
def test_excess_in_time_stops(source):
    """The clock moves ten milliseconds each time it is read: no waiting, and no luck."""
    reads = itertools.count()
    template = ChatTemplate(source, clock=lambda: next(reads) / 100)
    with pytest.raises(TemplateError, match="ran for more than"):
        template.render(USER)


def test_a_stopped_render_leaves_the_template_usable():
    template = ChatTemplate("{% for a in range(n) %}{{ big }}{% endfor %}")
    with pytest.raises(TemplateError):
        template.render(USER, n=90000, big="b" * 1000)
    assert template.render(USER, n=2, big="b").text == "bb"


def test_threads_have_their_own_meters():
    template = ChatTemplate("{% for a in range(n) %}{{ messages[0].content }}{% endfor %}")
    texts = {}

    def work(n):
        texts[n] = template.render([{"role": "user", "content": str(n)}], n=n).text

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {n: str(n) * n for n in range(1, 9)}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages|tojson }}", '[{"role": "user", "content": "x"}]'),
        ("{{ {'a': 'é<'}|tojson(indent=1) }}", '{\n "a": "é<"\n}'),
        ("{{ {'b': 1, 'a': 2}|tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ ['a', 'b']|join(', ') }}{{ [1, 2]|join }}", "a, b12"),
        ("{{ messages|join('-', attribute='role') }}", "user"),
        ("{{ 'a b a'|replace('a', 'c') }}{{ 'aa'.replace('a', 'b', 1) }}", "c b cba"),
        ("{{ 'a\nb'|indent(2) }}|{{ 'a\n\nb'|indent(2, true) }}", "a\n  b|  a\n\n  b"),
        ("{{ 'x' ~ 1 ~ none }}{{ 'x' + 'y' }}{{ 7 % 4 }}{{ '%s!' % 'a' }}", "x1Nonexy3a!"),
        ("{{ '%s=%d'|format('a', 2) }}{{ '{:>3}'.format('a') }}", "a=2  a"),
        (
            "{% for x in [1, 2, 3] %}{{ loop.index }}{{ loop.last }}{% endfor %}",
            "1False2False3True",
        ),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        (
            "{% for x in [[1], 2] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
            "12",
        ),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}", "2"),
        ("{{ 'a' in 'abc' and ('role' in messages[0]) and 1 < 2 <= 2 }}", "True"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "1"),
        ("{{ ' a '|trim }}{{ 'ab'|upper }}{{ 'a,b'.split(',')[-1] }}{{ 'abc'[1:] }}", "aABbbc"),
        ("{%- macro f(x) -%}<{{ x }}>{%- endmacro -%}{{ f('a') }}{{ f(x='b') }}", "<a><b>"),
        ("{{ undefined_thing }}{{ x is defined }}{{ x|default('d') }}", "Falsed"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
    ],
)
def test_the_jinja_that_templates_use(source, text):
    assert render(source) == text


def test_filters_and_methods_that_grow_are_the_bounded_ones():
    """Whoever adds a filter has to think of its growth: the list is written out here once more."""
    unbounded = {
        "center",
        "wordwrap",
        "groupby",
        "batch",
        "slice",
        "sum",
        "attr",
        "pprint",
        "random",
    }
    assert not unbounded & BoundedEnvironment().filters.keys()
