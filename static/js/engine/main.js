/** Starts the engine room. */

import { Room } from './room.js';

new Room().start();
