// What moves sideways inside the page can be reached with the keyboard, on every device.
function keepFocusable(part) {
  part.tabIndex = 0
  const observer = new MutationObserver(() => {
    if (part.tabIndex !== 0) part.tabIndex = 0
  })
  observer.observe(part, { attributes: true, attributeFilter: ["tabindex"] })
}

// The theme puts tables into boxes of its own once the page is there.
window.addEventListener("load", () =>
  setTimeout(() => {
    document.querySelectorAll("pre > code, .md-typeset table:not([class]), .wide").forEach(keepFocusable)
    // The empty corner of a table is no header.
    document.querySelectorAll("th:empty").forEach((corner) => corner.replaceWith(document.createElement("td")))
    // In which module of the sources a name stands helps no reader.
    document.querySelectorAll('[title*="arraycomm._"]').forEach((name) => name.removeAttribute("title"))
    // Landmarks that a screen reader can tell from one another.
    document.querySelectorAll(".md-code__nav").forEach((nav, index) => nav.setAttribute("aria-label", `Code ${index + 1}`))
  }, 100)
)
