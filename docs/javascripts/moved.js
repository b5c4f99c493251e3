// What stood on the page of the whole API has its place on the page that api.html links to.
if (/\/api\.html$/.test(location.pathname) && location.hash.startsWith("#arraycomm.")) {
  // A member that is not listed stands with its class or module.
  for (let name = location.hash; name.includes("."); name = name.slice(0, name.lastIndexOf("."))) {
    const link = document.querySelector(`article a[href$="${CSS.escape(name)}"]`)
    if (!link) continue
    location.replace(link.href.replace(/#.*/, location.hash))
    break
  }
}
