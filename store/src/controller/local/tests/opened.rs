//! What stays open.

use super::*;

#[tokio::test]
async fn what_was_located_stays_open_until_too_much_is() {
    let controller = Hooked::default().controller();
    let store = Store::new(controller.clone());
    let (dict, options) = (tssd_format::StateDict::new(), PutOptions::default());
    let keys: Vec<_> = (0..=MAX_OPENED).map(|it| Key::new(format!("{it:02}")).unwrap()).collect();
    for key in &keys {
        store.put_state_dict(key, &dict, &options).await.unwrap();
    }
    let locate = async |key| controller.locate(key, Selector::Newest).await.unwrap().lease;
    let first = locate(&keys[0]).await;
    for key in &keys[1..MAX_OPENED] {
        locate(key).await;
        assert!(Arc::ptr_eq(&first, &locate(&keys[0]).await), "it is still open");
    }
    locate(&keys[MAX_OPENED]).await;
    assert_eq!(controller.opened().located.len(), MAX_OPENED);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_deleted_while_it_is_opened_does_not_stay_open() {
    let volume = Hooked::default();
    let controller = volume.controller();
    let (store, key) = (Store::new(controller.clone()), Key::new("policy").unwrap());
    let (dict, other) = (tssd_format::StateDict::new(), Key::new("other").unwrap());
    for key in [&key, &other] {
        store.put_state_dict(key, &dict, &PutOptions::default()).await.unwrap();
    }
    let (deleting, deleted) = (controller.clone(), other.clone());
    let runtime = tokio::runtime::Handle::current();
    volume.before("open", move || {
        let delete = || runtime.block_on(deleting.delete(&deleted, Selection::All));
        assert_eq!(tokio::task::block_in_place(delete)?, 1);
        Ok(())
    });
    controller.locate(&key, Selector::Newest).await.unwrap();
    assert!(controller.opened().located.is_empty(), "it may be what was deleted");
    controller.locate(&key, Selector::Newest).await.unwrap();
    assert!(controller.opened().located.contains_key(&key));
}
