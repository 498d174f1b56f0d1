// What pages do beyond showing: ask before something is deleted, and send a choice at once.
"use strict";
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-confirm]");
  if (button && !window.confirm(button.dataset.confirm)) event.preventDefault();
});
