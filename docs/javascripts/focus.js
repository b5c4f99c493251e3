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
    document.querySelectorAll("pre > code, .md-typeset__scrollwrap, .wide").forEach(keepFocusable)
    // The buttons of each block are a group; as one landmark beside the other they would hide those of the page.
    document.querySelectorAll(".md-code__nav").forEach((buttons) => buttons.setAttribute("role", "group"))
  }, 100)
)
