// SPDX-License-Identifier: Apache-2.0
// A flag is searched as it is typed. To the theme's search a dash before a word means to leave the word out.
const post = Worker.prototype.postMessage;
const QUERY = 2;

Worker.prototype.postMessage = function (message, ...others) {
    if (message?.type === QUERY && typeof message.data === "string")
        message = { ...message, data: message.data.replace(/(^|\s)--?(?=\w)/g, "$1") };
    return post.call(this, message, ...others);
};
