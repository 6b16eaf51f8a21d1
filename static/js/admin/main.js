/** Starts the operators' page. */

import { Admin } from './admin.js';

new Admin().start();
