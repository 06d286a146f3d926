export { h, html, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./preact-htm.js";
