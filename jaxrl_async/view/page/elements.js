// Creates elements of the page from texts.

/** Return a new element with a text and a class. */
export const make = (tag, text, className) => {
  const element = document.createElement(tag);
  if (text != null) element.textContent = text;  // never as HTML: a policy wrote it
  if (className) element.className = className;
  return element;
};
