() => {
  // In the question: Enter asks; Ctrl, Shift or Command with Enter breaks the line; Escape leaves the field.
  // Outside text fields: A, B and T vote, N asks the next question.
  const BUTTONS = {a: "#vote-A", b: "#vote-B", t: "#vote-T", n: "#next-side, #next-blind"};
  const NO_TEXT = new Set(["button", "checkbox", "radio", "range", "submit"]);

  // A button of the tab that is not shown, and one that is disabled, must not be pressed.
  const press = (selector) => {
    const button = [...document.querySelectorAll(selector)].find((one) => one.offsetParent !== null && !one.disabled);
    button?.click();
  };
  const takesText = (field) =>
    field.isContentEditable || field.matches("textarea, select") || (field.matches("input") && !NO_TEXT.has(field.type));

  const handleEnter = (event, question) => {
    if (event.ctrlKey || event.shiftKey || event.metaKey) {
      document.execCommand("insertText", false, "\n"); // the one way that leaves the line in the field's undo history
    } else if (!event.altKey && !event.repeat) {
      question.blur(); // the next key may be a vote
      press("#ask-side, #ask-blind");
    }
    event.preventDefault();
    event.stopPropagation();
  };

  document.addEventListener("keydown", (event) => {
    const target = event.target;
    if (event.isComposing || !(target instanceof HTMLElement)) return;
    if (takesText(target)) {
      if (event.key === "Escape") target.blur();
      if (event.key === "Enter" && target.matches("#question textarea")) handleEnter(event, target);
    } else if (!event.ctrlKey && !event.altKey && !event.metaKey && !event.repeat) {
      const selector = BUTTONS[event.key.toLowerCase()];
      if (selector) press(selector);
    }
  }, true);
};
