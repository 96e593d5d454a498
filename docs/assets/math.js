// Typesets what `pymdownx.arithmatex` marked: \(...\) in the line, \[...\] on lines of its own.
// A formula that KaTeX cannot read stays as it was written, in red; the tests of the site look for these.
for (const place of document.querySelectorAll(".arithmatex")) {
  const written = place.textContent.trim();
  const display = written.startsWith("\\[");
  katex.render(written.slice(2, -2), place, {displayMode: display, throwOnError: false});
  // A browser may break the line after a formula, so a line could begin with a full stop: the mark joins the last box.
  const after = place.nextSibling;
  const mark = display ? null : /^[.,;:)\]]+/.exec(after?.data ?? "");
  const box = [...place.querySelectorAll(".katex-html > .katex-base")].pop();
  if (mark && box) {
    box.append(mark[0]);
    after.data = after.data.slice(mark[0].length);
  }
}
