"""Templates written to mislead the reading of the syntax tree: each takes something from earlier messages in a way that
a rule of `earlier.py` could miss."""

CHATML = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt %}<|im_start|>assistant
END{% endif %}"""


def _with(before: str, end: str) -> str:
    return before + CHATML.replace("END", end)


def _loop(body: str, end: str, *, names: str = "x=''", over: str = "messages") -> str:
    return _with(
        "{%- set ns = namespace(" + names + ") -%}{%- for m in " + over + " -%}" + body + "{%- endfor -%}", end
    )


_SET = "{%- if 'magic' in m.content %}{% set ns.x = 'M' %}{% elif '/b' in m.content %}{% set ns.x = 'B' %}{% endif -%}"
HOSTILE = {
    # lists of messages under other names
    "list or empty": _with("{%- set all = messages or [] -%}", "{{ all[0].content[:2] }}"),
    "list or empty, counted": _with("{%- set all = messages or [] -%}", "{{ all | length }}"),
    "list in a choice": _with("{%- set all = messages if tools else messages[1:] -%}", "{{ all | length % 2 }}"),
    "list in a dictionary": _with("{%- set box = {'all': messages} -%}", "{{ box.all | length }}"),
    "list in a list": _with("{%- set box = [messages] -%}", "{{ box[0][0].content[:3] }}"),
    "list given to a macro": _with("{%- macro f(a) %}{{ a | length }}{% endmacro -%}", "{{ f(messages) }}"),
    "macro reads the list": _with("{%- macro f() %}{{ messages[0].content[:3] }}{% endmacro -%}", "{{ f() }}"),
    "macro under another name": _with(
        "{%- macro f() %}{{ messages | length }}{% endmacro -%}{%- set g = f -%}", "{{ g() }}"
    ),
    "macro's default": _with("{%- macro f(n=messages | length) %}{{ n }}{% endmacro -%}", "{{ f() }}"),
    "second of the list": _with("", "{{ messages[1].content[:2] }}"),
    "one before the last but one": _with("", "{{ messages[-3].content[:2] if messages | length > 2 }}"),
    "part of the list": _with("", "{% for m in messages[-4:-1] %}{{ m.content[:1] }}{% endfor %}"),
    "sorted": _with("", "{{ (messages | sort(attribute='content'))[0].content[:2] }}"),
    "groups": _with("", "{% for g in messages | groupby('role') %}{{ g.list | length }}{% endfor %}"),
    "rejected": _with("", "{{ messages | rejectattr('role', 'equalto', 'user') | list | length }}"),
    "last of none": _with(
        "{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}",
        "{{ users[-1].content[:2] if users else 'nobody' }}",
    ),
    "last result": _with(
        "{%- set found = messages | selectattr('role', 'equalto', 'tool') | list -%}",
        "{{ found[-1].content[:2] if found else 'none' }}",
    ),
    "letter at a count": _with("{%- set n = messages | length -%}", "{{ ('abcdefghij' * 9)[n] }}"),
    "carried in a pair": _loop(
        "{%- if 'magic' in m.content %}{% set ns.x, y = ns.x ~ 'M', 1 %}{% endif -%}", "{{ ns.x }}"
    ),
    # variables merged by name
    "name of a loop and of the top": _loop(
        "{%- if t %}{% set t = m.content %}{% endif -%}{%- if 'magic' in t %}{% set ns.x = 'M' %}{% endif -%}",
        "{{ ns.x }}",
    ).replace("{%- set ns", "{%- set t = messages[0].content -%}{%- set ns", 1),
    "set in one branch only": _loop(
        "{%- if m.role == 'user' %}{% set t = m.content %}{% endif -%}"
        "{%- if t is defined and 'magic' in t %}{% set ns.x = m.content[:2] %}{% endif -%}",
        "{{ ns.x }}",
    ),
    "set under a carried condition": _loop(
        "{%- set t = 'no' -%}{%- if ns.on %}{% set t = 'magic' %}{% endif -%}"
        "{%- if 'magic' in t %}{% set ns.x = m.content[:2] %}{% endif -%}"
        "{%- if '/a' in m.content %}{% set ns.on = true %}{% endif -%}",
        "{{ ns.x }}",
        names="x='', on=false",
    ),
    "captured text": _loop(
        "{%- set t %}{{ m.content }}{% endset -%}{%- if 'magic' in t %}{% set ns.x = 'M' %}{% endif -%}", "{{ ns.x }}"
    ),
    "text of a macro": "{%- macro f(t) %}{{ t | upper }}{% endmacro -%}"
    + _loop("{%- if 'MAGIC' in f(m.content) %}{% set ns.x = m.content[:4] %}{% endif -%}", "{{ ns.x }}"),
    "parameter with the list's name": "{%- macro f(messages) %}{{ messages }}{% endmacro -%}"
    + _loop("{%- if 'magic' in f(m.content) %}{% set ns.x = m.content[:4] %}{% endif -%}", "{{ ns.x }}"),
    "pair": _loop(
        "{%- set a, b = m.content, m.role -%}{%- if 'magic' in a and b == 'user' %}{% set ns.x = a[:3] %}{% endif -%}",
        "{{ ns.x }}",
    ),
    "words in an inner loop": _loop(
        "{%- set parts = m.content.split(' ') -%}{%- for w in parts -%}{%- if w == 'magic' %}{% set ns.x = m.role %}"
        "{% endif -%}{%- endfor -%}",
        "{{ ns.x }}",
    ),
    "word of an inner loop": _loop(
        "{%- for w in m.content.split(' ') -%}{%- if 'magic' in w %}{% set ns.x = m.role %}{% endif -%}{%- endfor -%}",
        "{{ ns.x }}",
    ),
    "two namespaces of one name": _with(
        "{%- set ns = namespace(x='') -%}{%- for m in messages -%}" + _SET + "{%- endfor -%}"
        "{%- set old = ns.x -%}{%- set ns = namespace(x='') -%}"
        "{%- for m in messages -%}{%- if '/a' in m.content %}{% set ns.x = 'A' %}{% endif -%}{%- endfor -%}",
        "{{ old }}{{ ns.x }}",
    ),
    "two loops": _with(
        "{%- set ns = namespace(x='') -%}{%- for m in messages -%}" + _SET + "{%- endfor -%}"
        "{%- for m in messages -%}{%- if '/a' in m.content and ns.x %}{% set ns.x = 'A' %}{% endif -%}{%- endfor -%}",
        "{{ ns.x }}",
    ),
    "copied after the loop": _loop(_SET, "{{ y }}").replace(
        "{%- for m in messages -%}\n", "{%- set y = ns.x -%}{%- for m in messages -%}\n", 1
    ),
    "changed after the loop": _loop(_SET, "{{ ns.x }}").replace(
        "{%- for m in messages -%}\n", "{%- set ns.x = ns.x ~ '!' -%}{%- for m in messages -%}\n", 1
    ),
    # loops from the end
    "last of a loop from the end": _loop(
        "{%- if loop.last and 'magic' in m.content %}{% set ns.x = 'M' %}{% endif -%}",
        "{{ ns.x }}",
        over="messages[::-1]",
    ),
    "from the end without a latch": _loop(_SET, "{{ ns.x }}", over="messages | reverse"),
    "latch": _loop(
        "{%- if ns.open and 'magic' in m.content %}{% set ns.open = false %}{% set ns.x = m.content[:3] %}{% endif -%}",
        "{{ ns.x }}",
        names="x='', open=true",
        over="messages[::-1]",
    ),
    "nested latch": _loop(
        "{%- if ns.open and m.role == 'user' %}{% set t = m.content | trim %}{% if 'magic' in t %}"
        "{% set ns.open = false %}{% set ns.x = t[:3] %}{% endif %}{% endif -%}",
        "{{ ns.x }}",
        names="x='', open=true",
        over="messages[::-1]",
    ),
    "latch that is shut before": _loop(
        "{%- if ns.open and 'magic' in m.content %}{% set ns.open = false %}{% set ns.x = m.content[:3] %}{% endif -%}",
        "{{ ns.x }}",
        names="x='', open=true",
        over="messages[::-1]",
    ).replace(
        "{%- for m in messages[::-1]", "{%- set ns.open = '/a' in messages[0].content -%}{%- for m in messages[::-1]"
    ),
    "latch that another block shuts": _loop(
        "{%- if ns.open and 'magic' in m.content %}{% set ns.x = m.content[:3] %}{% endif -%}"
        "{%- if '/a' in m.content %}{% set ns.open = false %}{% endif -%}",
        "{{ ns.x }}",
        names="x='', open=true",
        over="messages[::-1]",
    ),
    "latch forwards": _loop(
        "{%- if ns.open and 'magic' in m.content %}{% set ns.open = false %}{% set ns.x = m.content[:3] %}{% endif -%}",
        "{{ ns.x }}",
        names="x='', open=true",
    ),
    "latch that opens again": _loop(
        "{%- if ns.open and 'magic' in m.content %}{% set ns.open = false %}{% set ns.x = m.content[:3] %}{% endif -%}"
        "{%- if '/a' in m.content %}{% set ns.open = true %}{% endif -%}",
        "{{ ns.x }}",
        names="x='', open=true",
        over="messages[::-1]",
    ),
    "latch with a second value": _loop(
        "{%- if ns.open and 'magic' in m.content %}{% set ns.open = false %}{% set ns.x = m.content[:3] %}{% endif -%}"
        "{%- if ns.open and '/b' in m.content %}{% set ns.x = 'B' %}{% endif -%}",
        "{{ ns.x }}",
        names="x='', open=true",
        over="messages[::-1]",
    ),
    # conditions that are true of one message for another reason
    "last of the users": _loop(
        "{%- if loop.last %}{% set ns.x = m.content[:3] %}{% endif -%}",
        "{{ ns.x }}",
        over="messages if m.role == 'user'",
    ),
    "only some messages": _loop(
        "{%- if 'magic' in m.content %}{% set ns.x = m.content[-3:] %}{% endif -%}",
        "{{ ns.x }}",
        over="messages if m.role == 'user'",
    ),
    "first word of a variable": _loop(
        "{%- if bos in m.content %}{% set ns.x = m.content[-3:] %}{% endif -%}", "{{ ns.x }}"
    ).replace("{%- set ns", "{%- set bos = 'magic' -%}{%- set ns", 1),
    "before another": _loop(
        "{%- if loop.nextitem is defined and loop.nextitem.role == 'tool' %}{% set ns.x = m.role %}"
        "{% elif 'magic' in m.content %}{% set ns.x = 'M' %}{% endif -%}",
        "{{ ns.x }}",
    ),
    "changed": _loop("{%- if loop.changed(m.role) %}{% set ns.x = m.content[:3] %}{% endif -%}", "{{ ns.x }}"),
    "cycle": CHATML.replace("{{ m.content }}", "{{ loop.cycle('a', 'b') }}{{ m.content }}"),
    "truth of a number": _loop(
        "{%- if ns.x %}{% set ns.x = false %}{% endif -%}"
        "{%- if 'magic' in m.content %}{% set ns.x = true %}{% endif -%}",
        "{{ ns.x }}",
        names="x=0",
    ),
    "skipped messages": _loop("{%- if m.role == 'tool' %}{% continue %}{% endif -%}" + _SET, "{{ ns.x }}"),
    "stopped": _loop(_SET + "{%- if '/a' in m.content %}{% break %}{% endif -%}", "{{ ns.x }}"),
    # lists cut by one message, positions
    "cut by a word": _with(
        "{%- if 'magic' in messages[0].content %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}"
        "{% endif -%}",
        "{{ rest[0].content[:2] }}",
    ),
    "cut and compared": _with(
        "{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}"
        "{% set rest = messages %}{% endif -%}{%- set ns = namespace(x=-1) -%}{%- for m in rest -%}"
        "{%- if 'magic' in m.content %}{% set ns.x = loop.index0 %}{% endif -%}{%- endfor -%}",
        "",
    ).replace("{{ m.content }}", "{{ '!' if loop.index0 <= ns.x }}{{ m.content }}"),
    "cut twice": _with(
        "{%- set rest = messages[1:] -%}{%- set rest = rest[1:] -%}", "{{ rest[0].content[:2] if rest }}"
    ),
    "distance to the end": _loop(
        "{%- if 'magic' in m.content %}{% set ns.x = loop.revindex %}{% endif -%}", "{{ ns.x }}", names="x=0"
    ),
    "two positions": _loop(
        "{%- if 'magic' in m.content %}{% set ns.x = loop.index0 %}{% endif -%}"
        "{%- if '/b' in m.content %}{% set ns.y = loop.index0 %}{% endif -%}",
        "{{ 'x' if ns.x > ns.y else 'y' }}",
        names="x=-1, y=-1",
    ),
    "neighbouring positions": _loop(
        "{%- if 'magic' in m.content %}{% set ns.x = loop.index0 %}{% endif -%}"
        "{%- if '/b' in m.content %}{% set ns.y = loop.index %}{% endif -%}",
        "{{ 'next' if ns.x == ns.y else '' }}",
        names="x=-1, y=-1",
    ),
    "position and a word": CHATML.replace(
        "{{ m.content }}", "{{ messages[loop.index0 - 1].content[:2] if loop.index0 }}{{ m.content }}"
    ),
    "position of the writer": _loop(
        "{%- if 'magic' in m.content %}{% set ns.x = loop.index0 %}{% endif -%}",
        "{{ messages[ns.x].content[:9] if ns.x >= 0 }}{{ messages[ns.x + 1].content[:2] if ns.x >= 0 }}",
        names="x=-1",
    ),
}
