// What pages do beyond showing: ask before something is deleted, and send a choice at once.
"use strict";
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-confirm]");
  if (button && !window.confirm(button.dataset.confirm)) event.preventDefault();
});
document.addEventListener("change", (event) => {
  if (event.target.matches("[data-send]")) event.target.form.submit();
});
const tokens = document.querySelector(".tokens");
if (tokens) {
  const said = document.querySelector("output.token");
  let here = null;
  const show = (token) => {
    if (here) here.classList.remove("here");
    here = token;
    here.classList.add("here");
    here.scrollIntoView({ block: "nearest" });
    said.textContent = here.title;
  };
  tokens.addEventListener("click", (event) => {
    if (event.target.matches(".t")) show(event.target);
  });
  tokens.addEventListener("keydown", (event) => {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = here ? here[step] : tokens.firstElementChild;
    if (next) show(next);
  });
}
const live = document.querySelector("[data-events]");
if (live) {
  const events = new EventSource(live.dataset.events);
  events.onmessage = (event) => { live.innerHTML = JSON.parse(event.data); };
  window.addEventListener("pagehide", () => events.close());
}
