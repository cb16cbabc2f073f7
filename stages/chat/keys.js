() => {
  // Outside text fields: A, B and T vote, N asks the next question. Escape leaves a text field.
  const BUTTONS = {a: "#vote-A", b: "#vote-B", t: "#vote-T", n: "#next"};
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("textarea, input:not([type=radio], [type=checkbox], [type=range])")) {
      if (event.key === "Escape") event.target.blur();
    } else if (!event.ctrlKey && !event.altKey && !event.metaKey && !event.repeat) {
      const button = document.querySelector(BUTTONS[event.key.toLowerCase()] ?? "#none");
      if (button?.offsetParent && !button.disabled) button.click();
    }
  });
};
