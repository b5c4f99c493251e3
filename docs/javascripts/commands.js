// Copying a session at a shell takes its commands, without the prompt and without what they print.
document.querySelectorAll(".highlight pre").forEach((block) => {
  if (!block.querySelector(".gp")) return
  const lines = block.textContent.split("\n").filter((line) => line.startsWith("$ "))
  block.dataset.copy = lines.map((line) => line.slice(2)).join("\n")
})
