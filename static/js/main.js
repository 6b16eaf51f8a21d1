/** Starts the page. */

import { App } from './app.js';

new App().start();
