"""The site: Sphinx with furo and MyST. `make docs` builds it into build/docs, with warnings as
errors and without a network."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src"), str(HERE.parent / "benchmarks")]

import liger_kernel  # noqa: E402  found by the line above

project = "liger-kernel"
author = "the authors of liger-kernel"
release = version = liger_kernel.__version__
html_title = "liger-kernel"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
extensions += ["surface", "command_line", "all_rows", "benchmark_plots", "outside"]  # of _ext
exclude_patterns = ["_ext", "benchmarks/data"]
nitpicky = True
highlight_language = "text"  # of blocks that name none: output, formulas
# Types of other packages, of which no inventory is at hand without a network, and annotations that
# are abbreviations of ours
nitpick_ignore_regex = [("py:.*", r"(?!liger_kernel\.).*"), ("py:.*", r"liger_kernel(\.\w+)*\.[A-Z_]\w*")]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # tests/test_notebooks.py executes them; the site shows what they store
suppress_warnings = ["mystnb.unknown_mime_type"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
autodoc_mock_imports = ["flytekit", "flyte", "lightning"]
python_use_unqualified_type_names = True
add_module_names = True
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 100

copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

linkcheck_anchors = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0a7d6c",
        "color-brand-content": "#0a6b5d",
        "color-brand-visited": "#0a6b5d",
    },
    "dark_css_variables": {
        "color-brand-primary": "#4cc3ae",
        "color-brand-content": "#4cc3ae",
        "color-brand-visited": "#4cc3ae",
    },
}


def _flags_stay_whole(app, page, template, context, doctree):
    """A browser would break a line within ``--length``, too."""
    whole = lambda block: re.sub(r"(?<![\w-])--[a-z][\w-]*", r'<span class="whole">\g<0></span>', block[0])
    if "body" in context:
        context["body"] = re.sub(r"<(pre|code)\b.*?</\1>", whole, context["body"], flags=re.DOTALL)


def setup(app):
    app.connect("html-page-context", _flags_stay_whole)
